//! Compares every struct, request and constant of the crate with what was measured on the driver's
//! headers.
//!
//! `cargo xtask abi dump` writes the tables in `abi/` from the driver's source trees, and
//! `cargo xtask abi check` compares them with a tree. These tests compare the Rust side with the
//! tables, for every generation and both ways: what the crate defines must be in the tables, and
//! what is in the tables must be defined.

use ascend_ioctl::layout::{self, Layout};
use ascend_ioctl::svm::{ARG_SIZE, DATA, Op};
use ascend_ioctl::{Command, Generation, hdc, klog};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The table of a generation.
struct Table(Value);

/// A field as the driver's compiler places it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    offset: usize,
    size: usize,
}

impl Place {
    fn end(self) -> usize {
        self.offset + self.size
    }

    fn overlaps(self, other: Place) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

impl Table {
    fn of(generation: Generation) -> Table {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("abi").join(generation.delta().table);
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}; write it with `cargo xtask abi dump`", path.display()));
        let table = Table(serde_json::from_str(&text).unwrap());
        assert_eq!(table.0["generation"], generation.name());
        table
    }

    fn part(&self, name: &str) -> &Map<String, Value> {
        self.0[name].as_object().unwrap()
    }

    fn fields(&self, c_struct: &str) -> Vec<(&str, Place)> {
        let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
        let fields = self.part("structs")[c_struct]["fields"].as_object().unwrap();
        let place = |field: &Value| Place { offset: number(&field["offset"]), size: number(&field["size"]) };
        fields.iter().map(|(name, field)| (name.as_str(), place(field))).collect()
    }

    fn constant(&self, c_name: &str) -> Option<i128> {
        let value = self.part("constants").get(c_name)?;
        Some(value.as_u64().map(i128::from).or(value.as_i64().map(i128::from)).expect("a number"))
    }
}

/// Every generation with its table.
fn tables() -> impl Iterator<Item = (Generation, Table)> {
    Generation::ALL.into_iter().map(|generation| (generation, Table::of(generation)))
}

/// Whether the driver reserved the field for later use. Generations divide such space differently.
fn is_reserve(c_field: &str) -> bool {
    ["reserve", "resv", "rsv"].iter().any(|prefix| c_field.starts_with(prefix))
}

/// The differences between `layout` and a generation's table.
fn complaints(layout: &Layout, table: &Table) -> Vec<String> {
    let Some(measured) = table.part("structs").get(layout.c_name) else {
        return vec!["the table does not have it".to_owned()];
    };
    let mut wrong = Vec::new();
    let (size, align) = (measured["size"].as_u64().unwrap() as usize, measured["align"].as_u64().unwrap() as usize);
    if layout.align != align {
        wrong.push(format!("alignment {} instead of {align}", layout.align));
    }
    let c_fields = table.fields(layout.c_name);
    let in_c = |c_name: &str| c_fields.iter().find(|(name, _)| *name == c_name).map(|(_, place)| *place);
    let place = |field: &layout::Field| Place { offset: field.offset, size: field.size };
    let appended = layout.fields.iter().filter(|field| in_c(field.c_name).is_none());
    // The newest form serves older generations too, if new fields lie beyond their end or in their
    // reserved space.
    if layout.size < size || (layout.size > size && appended.clone().all(|field| place(field).end() <= size)) {
        wrong.push(format!("size {} instead of {size}", layout.size));
    }
    for field in appended {
        let taken = c_fields.iter().find(|(name, c)| !is_reserve(name) && c.overlaps(place(field)));
        wrong.extend(taken.map(|(c_name, _)| format!("{} lies where the driver has {c_name}", field.c_name)));
    }
    // A union that is defined as bytes has a size and no fields.
    for &(c_name, c_place) in c_fields.iter().filter(|_| !layout.fields.is_empty()) {
        match layout.fields.iter().find(|field| field.c_name == c_name) {
            Some(field) if place(field) == c_place => {}
            Some(field) => wrong.push(format!("{c_name} at {:?} instead of {c_place:?}", place(field))),
            None if is_reserve(c_name) => {}
            // Another member of a union, of which the crate names one.
            None if layout.fields.iter().any(|f| in_c(f.c_name) == Some(place(f)) && place(f).overlaps(c_place)) => {}
            None => wrong.push(format!("{c_name} at {c_place:?} is missing")),
        }
    }
    wrong
}

#[test]
fn every_struct_has_the_drivers_size_alignment_and_fields() {
    let mut wrong = Vec::new();
    for (generation, table) in tables() {
        for layout in layout::layouts().filter(|layout| layout.generations.contains(&generation)) {
            let name = format!("{} ({}) in {generation}", layout.name, layout.c_name);
            wrong.extend(complaints(layout, &table).into_iter().map(|complaint| format!("{name}: {complaint}")));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_struct_is_exact_in_the_newest_generation_that_has_it() {
    for layout in layout::layouts() {
        let newest = *layout.generations.iter().max().expect("a struct of no generation");
        let table = Table::of(newest);
        let measured = &table.part("structs")[layout.c_name];
        assert_eq!(layout.size as u64, measured["size"], "size of {} in {newest}", layout.name);
        for field in layout.fields {
            let known = table.fields(layout.c_name).iter().any(|(name, _)| *name == field.c_name);
            assert!(known, "{newest} has no {} in {}", field.c_name, layout.c_name);
        }
    }
}

#[test]
fn every_struct_of_the_tables_is_defined_for_its_generation() {
    for (generation, table) in tables() {
        for c_name in table.part("structs").keys() {
            let defined = layout::layouts().any(|l| l.c_name == c_name && l.generations.contains(&generation));
            assert!(defined, "{c_name} of {generation} has no struct in the crate");
        }
    }
}

/// A command's request in the driver's headers. HDC's headers have only the number.
fn expected_request(command: &Command, table: &Table) -> Option<u32> {
    if command.magic == hdc::MAGIC {
        let number = table.constant(command.c_name)?;
        return Some(u32::from(hdc::MAGIC) << 8 | u32::try_from(number).unwrap());
    }
    let text = table.part("requests").get(command.c_name)?.as_str().unwrap();
    Some(u32::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap())
}

#[test]
fn every_command_has_the_drivers_request_value() {
    for (generation, table) in tables() {
        for command in layout::commands(generation) {
            let expected = expected_request(command, &table);
            assert_eq!(Some(command.request()), expected, "{} in {generation}", command.c_name);
        }
    }
}

#[test]
fn every_argument_is_one_struct_of_the_list() {
    for generation in Generation::ALL {
        for command in layout::commands(generation) {
            let Some(name) = command.argument else { continue };
            let named: Vec<&Layout> = layout::layouts().filter(|layout| layout.name == name).collect();
            assert_eq!(named.len(), 1, "structs named {name}, the argument of {}", command.c_name);
            assert_eq!(command.layout().map(|layout| layout.c_name), Some(named[0].c_name));
        }
        for svm in generation.svm_commands() {
            let size = svm.command.layout().map_or(0, |layout| layout.size);
            assert!(size <= ARG_SIZE - DATA, "{} does not fit the union", svm.command.name);
        }
    }
}

#[test]
fn every_request_of_the_tables_is_a_command_of_its_generation() {
    for (generation, table) in tables() {
        let defined: BTreeSet<&str> = layout::commands(generation).map(|command| command.c_name).collect();
        for c_name in table.part("requests").keys() {
            assert!(defined.contains(c_name.as_str()), "{c_name} of {generation} is no command of the crate");
        }
    }
}

#[test]
fn a_generation_without_a_command_answers_none() {
    let tables: Vec<_> = tables().collect();
    for &op in Op::ALL {
        let commands = Generation::ALL.iter().filter_map(|generation| generation.svm(op));
        let names: BTreeSet<&str> = commands.map(|svm| svm.command.c_name).collect();
        assert_eq!(names.len(), 1, "{op:?} has more or less than one C name: {names:?}");
        for (generation, table) in &tables {
            let exists = names.iter().any(|name| table.part("requests").contains_key(*name));
            assert_eq!(generation.svm(op).is_some(), exists, "{op:?} in {generation}");
        }
    }
}

#[test]
fn every_command_finds_itself_by_its_number() {
    for generation in Generation::ALL {
        for number in 0..=u8::MAX {
            let found = generation.svm_by_number(number).map(|found| found.op);
            let expected = generation.svm_commands().find(|svm| svm.command.number == number).map(|svm| svm.op);
            assert_eq!(found, expected, "number {number} in {generation}");
        }
    }
}

#[test]
fn every_constant_has_the_drivers_value_and_only_where_it_says_so() {
    for (generation, table) in tables() {
        for constant in layout::constants() {
            let measured = table.constant(constant.c_name);
            if constant.generations.contains(&generation) {
                let name = constant.c_name;
                assert_eq!(measured, Some(constant.value), "{} ({name}) in {generation}", constant.name);
            } else {
                assert_ne!(measured, Some(constant.value), "{} is in {generation} too", constant.c_name);
            }
        }
    }
}

#[test]
fn every_limit_is_that_of_its_generation() {
    for (generation, table) in tables() {
        for (c_name, value) in layout::limits(generation) {
            assert_eq!(table.constant(c_name), Some(value), "{c_name} in {generation}");
        }
        let size = |c_name: &str| table.part("structs")[c_name]["size"].as_u64().unwrap() as usize;
        assert_eq!(size("devdrv_manager_hccl_devinfo"), generation.delta().devinfo_size, "{generation}");
        assert_eq!(size("urd_p2p_attr"), generation.delta().p2p_size, "{generation}");
    }
}

#[test]
fn every_text_is_the_drivers() {
    for (generation, table) in tables() {
        for (c_name, value) in layout::texts() {
            let measured = table.part("constants").get(c_name).and_then(Value::as_str);
            assert_eq!(measured.map(str::as_bytes), Some(value), "{c_name} in {generation}");
        }
    }
    assert_eq!(klog::MAGIC.strip_prefix(klog::MAGIC_TEXT.as_bytes()), Some(&[0][..]), "one NUL ends the magic word");
}

#[test]
fn every_constant_of_the_tables_is_used() {
    for (generation, table) in tables() {
        let mut used: BTreeSet<&str> = layout::constants().map(|constant| constant.c_name).collect();
        used.extend(layout::texts().map(|(c_name, _)| c_name));
        used.extend(layout::limits(generation).map(|(c_name, _)| c_name));
        used.extend(hdc::COMMANDS.iter().map(|command| command.c_name));
        for c_name in table.part("constants").keys() {
            assert!(used.contains(c_name.as_str()), "{c_name} of {generation} is not used by the crate");
        }
    }
}

/// The crate's sources.
fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut directories = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}

/// The word after `prefix` in a line of code.
fn word_behind<'a>(line: &'a str, prefix: &str) -> Option<&'a str> {
    line.trim_start().strip_prefix(prefix)?.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

#[test]
fn no_struct_of_the_boundary_is_left_out_of_the_list() {
    let listed: BTreeSet<&str> = layout::layouts().map(|layout| layout.name).collect();
    let mut seen = 0;
    for (path, text) in sources().iter().filter(|(path, _)| !path.ends_with("layout.rs")) {
        let by_hand = text.match_indices("\n#[repr(C").map(|(at, _)| &text[at..]);
        let by_hand = by_hand.map(|text| text.lines().find_map(|line| word_behind(line, "pub struct ")).unwrap());
        let declared = text.lines().filter(|line| line.contains(" = \"")).filter_map(|l| word_behind(l, "pub struct "));
        // The page and the room are structs of the list with more behind them.
        let longer = ["Page", "DevInfoRoom", "NoArgument"];
        for name in by_hand.chain(declared).filter(|name| !longer.contains(name)) {
            assert!(listed.contains(name), "{name} in {} is not in layout::layouts()", path.display());
            seen += 1;
        }
    }
    assert_eq!(seen, layout::layouts().count(), "structs in the sources, and in the list");
}

#[test]
fn no_command_is_left_out_of_the_list() {
    let listed = layout::commands(Generation::NEWEST).count() - Generation::NEWEST.svm_commands().count();
    let mut defined = 0;
    for (_, text) in sources() {
        let constants = text.lines().filter(|line| word_behind(line, "pub const ").is_some());
        defined += constants.filter(|line| line.contains(": Typed<")).count();
    }
    assert_eq!(defined, listed, "commands in the sources, and in the lists");
}
