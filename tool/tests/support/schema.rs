//! Checks a JSON document against its schema in docs/schema.
//!
//! This knows the part of JSON Schema that those files use, and adds one rule: a field that the
//! schema does not name is an error, so that every field that is printed is documented.

use serde_json::Value;

/// The schema of a command's output.
pub fn load(name: &str) -> Value {
    let path = format!("{}/../docs/schema/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every violation of the schema, with its place in the document.
pub fn violations(schema: &Value, document: &Value) -> Vec<String> {
    let mut found = Vec::new();
    check(schema, schema, document, "$", &mut found);
    found
}

/// Fails if the document violates the schema.
#[track_caller]
pub fn assert_fits(name: &str, document: &Value) {
    let found = violations(&load(name), document);
    assert!(found.is_empty(), "{}\n{document:#}", found.join("\n"));
}

fn check(root: &Value, schema: &Value, value: &Value, place: &str, found: &mut Vec<String>) {
    if let Some(reference) = schema.get("$ref") {
        let name = reference.as_str().and_then(|text| text.strip_prefix("#/$defs/")).expect("a reference to $defs");
        let target = root["$defs"].get(name).unwrap_or_else(|| panic!("the schema has no {name}"));
        return check(root, target, value, place, found);
    }
    for key in schema.as_object().expect("a schema is an object").keys() {
        // A keyword that is not known here would be a rule that is never checked.
        const KNOWN: [&str; 14] = [
            "$schema",
            "$defs",
            "title",
            "description",
            "type",
            "enum",
            "const",
            "properties",
            "required",
            "items",
            "minimum",
            "pattern",
            "minItems",
            "examples",
        ];
        assert!(KNOWN.contains(&key.as_str()), "{place}: unknown keyword `{key}`");
    }
    if let Some(kind) = schema.get("type") {
        let kinds: Vec<&str> = match kind {
            Value::String(kind) => vec![kind],
            Value::Array(kinds) => kinds.iter().map(|kind| kind.as_str().expect("a type's name")).collect(),
            _ => panic!("{place}: a type is a name or a list of names"),
        };
        if !kinds.iter().any(|kind| is(kind, value)) {
            found.push(format!("{place}: {value} is not {}", kinds.join(" or ")));
            return;
        }
    }
    if let Some(allowed) = schema.get("enum").and_then(Value::as_array) {
        if !allowed.contains(value) {
            found.push(format!("{place}: {value} is not one of {allowed:?}"));
        }
    }
    if let Some(only) = schema.get("const") {
        if only != value {
            found.push(format!("{place}: {value} is not {only}"));
        }
    }
    if let (Some(minimum), Some(number)) = (schema.get("minimum").and_then(Value::as_f64), value.as_f64()) {
        if number < minimum {
            found.push(format!("{place}: {number} is less than {minimum}"));
        }
    }
    if let (Some(least), Some(items)) = (schema.get("minItems").and_then(Value::as_u64), value.as_array()) {
        if (items.len() as u64) < least {
            found.push(format!("{place}: fewer than {least} items"));
        }
    }
    if let Some(object) = value.as_object() {
        let properties = schema.get("properties").and_then(Value::as_object);
        for name in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            let name = name.as_str().expect("a field's name");
            if !object.contains_key(name) {
                found.push(format!("{place}: `{name}` is missing"));
            }
        }
        for (name, inner) in object {
            match properties.and_then(|properties| properties.get(name)) {
                Some(schema) => check(root, schema, inner, &format!("{place}.{name}"), found),
                None => found.push(format!("{place}: `{name}` is not documented")),
            }
        }
    }
    if let (Some(items), Some(schema)) = (value.as_array(), schema.get("items")) {
        for (index, item) in items.iter().enumerate() {
            check(root, schema, item, &format!("{place}[{index}]"), found);
        }
    }
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("`{other}` is not a type of JSON Schema"),
    }
}
