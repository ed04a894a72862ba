//! The table of functions, enums, structs and numbers is what the facts say.

use ascendcl::table::{Class, ENUMS, ERRORS, FUNCTIONS, HANDLES, LINKED, MACROS, OPAQUE, STRUCTS};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

fn facts() -> Value {
    serde_json::from_str(include_str!("facts/acl-abi.json")).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// A C type without spaces and with one spelling for each.
fn spelled(kind: &str) -> String {
    kind.replace(' ', "").replace("VOID_PTR", "void*")
}

#[test]
fn every_function_has_the_class_and_the_prototype_of_the_facts() {
    let facts = facts();
    let facts: BTreeMap<&str, &Value> =
        facts["functions"].as_array().unwrap().iter().map(|function| (text(&function["name"]), function)).collect();
    let names: BTreeSet<&str> = FUNCTIONS.iter().map(|function| function.name()).collect();
    assert_eq!(names.len(), FUNCTIONS.len(), "a name appears twice");
    assert_eq!(names, facts.keys().copied().collect());
    for function in FUNCTIONS {
        let fact = facts[function.name()];
        let class = match function.class {
            Class::Memory => "memory",
            Class::Thin => "thin",
            Class::Absent => "absent",
        };
        assert_eq!(class, text(&fact["class"]), "{}", function.prototype);
        assert_eq!(spelled(function.returns()), spelled(text(&fact["returns"]["type"])), "{}", function.prototype);
        let expected: Vec<(String, &str)> = fact["params"]
            .as_array()
            .unwrap()
            .iter()
            .map(|parameter| match text(&parameter[2]) {
                "variadic" => ("...".to_owned(), ""),
                _ => (spelled(text(&parameter[0])), text(&parameter[1])),
            })
            .collect();
        let own: Vec<(String, &str)> = function.parameters().map(|(kind, name)| (spelled(kind), name)).collect();
        assert_eq!(own, expected, "{}", function.prototype);
    }
}

#[test]
fn each_class_has_as_many_functions_as_the_facts_say() {
    let count = |class| FUNCTIONS.iter().filter(|function| function.class == class).count();
    assert_eq!((count(Class::Memory), count(Class::Thin), count(Class::Absent)), (74, 83, 89));
}

#[test]
fn every_number_has_the_value_of_the_facts() {
    let facts = facts();
    let numbers = |name: &str| -> BTreeMap<String, i64> {
        let named = facts[name].as_object().unwrap().iter();
        named.map(|(name, value)| (name.clone(), value.as_i64().unwrap())).collect()
    };
    let own: BTreeMap<String, i64> = ERRORS.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
    assert_eq!(own, numbers("error_codes"));
    // The length of an array, which the facts have as the array's size only.
    let own = MACROS.iter().filter(|(name, _)| *name != "UCE_INFO_RESERVED_SIZE");
    let own: BTreeMap<String, i64> = own.map(|&(name, value)| (name.to_owned(), value as i64)).collect();
    assert_eq!(own, numbers("macros"));
    let enums = facts["enums"].as_object().unwrap();
    assert_eq!(enums.len(), ENUMS.len());
    for enumeration in ENUMS {
        let own: BTreeMap<&str, i64> = enumeration.values.iter().copied().collect();
        let expected = enums[enumeration.name].as_object().unwrap().iter();
        let expected: BTreeMap<&str, i64> =
            expected.map(|(name, value)| (name.as_str(), value.as_i64().unwrap())).collect();
        assert_eq!(own, expected, "{}", enumeration.name);
    }
}

#[test]
fn every_struct_has_the_layout_of_the_facts() {
    let facts = facts();
    let structs = facts["structs"].as_object().unwrap();
    assert_eq!(structs.len(), STRUCTS.len());
    for own in STRUCTS {
        let fact = &structs[own.name];
        let whole = (own.union, own.size as u64, own.align as u64);
        let expected = (fact["kind"] == "union", fact["size"].as_u64().unwrap(), fact["align"].as_u64().unwrap());
        assert_eq!(whole, expected, "{}", own.name);
        let fields = fact["fields"].as_array().unwrap();
        assert_eq!(own.fields.len(), fields.len(), "{}", own.name);
        for (own_field, fact) in own.fields.iter().zip(fields) {
            let place = (own_field.name, own_field.offset as u64, own_field.size as u64);
            let expected = (text(&fact[0]), fact[2].as_u64().unwrap(), fact[3].as_u64().unwrap());
            assert_eq!(place, expected, "{}", own.name);
            // No program looks into it: ours are bytes of the same size.
            if text(&fact[1]) != "aclrtErrorInfoDetail" {
                assert_eq!(spelled(own_field.kind), spelled(text(&fact[1])), "{}.{}", own.name, own_field.name);
            }
        }
    }
}

#[test]
fn every_handle_is_a_pointer_a_number_or_an_opaque_struct_as_in_the_facts() {
    let facts = facts();
    for (name, kind) in facts["handles"].as_object().unwrap() {
        let own = HANDLES.iter().find(|(own, _)| own == name).map(|(_, kind)| *kind);
        match text(kind) {
            "opaque struct" => assert!(OPAQUE.contains(&name.as_str()), "{name}"),
            kind if kind.starts_with("function pointer") => assert_eq!(own, Some("void (*)(void *)"), "{name}"),
            kind => assert_eq!(own.map(spelled), Some(spelled(kind)), "{name}"),
        }
    }
    for name in facts["hccl"].as_array().unwrap() {
        assert!(LINKED.contains(&text(name)), "{name}");
    }
}
