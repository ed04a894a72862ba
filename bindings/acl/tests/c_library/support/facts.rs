//! The facts that the header and the exports follow.

use serde_json::Value;
use std::sync::LazyLock;

pub static FACTS: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../facts/acl-abi.json")).unwrap());

/// Those of the driver's own library.
pub static HAL: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../facts/hal-abi.json")).unwrap());

/// A list of the facts.
pub fn list(name: &str) -> &'static [Value] {
    FACTS[name].as_array().unwrap()
}

/// The functions of both.
pub fn functions() -> impl Iterator<Item = &'static Value> {
    list("functions").iter().chain(HAL["functions"].as_array().unwrap())
}

/// A text of the facts.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// The names of the functions that are served.
pub fn served() -> impl Iterator<Item = &'static str> {
    functions().filter(|function| function["class"] != "absent").map(|function| text(&function["name"]))
}
