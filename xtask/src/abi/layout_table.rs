//! The layout table of one driver generation, as in `ioctl/abi/<generation>.json`.
//!
//! All keys are C names, so a reader can look them up in the driver's source. The file has one
//! field per line in a fixed order, so a change of the driver changes only the lines of that field.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

use serde::{Deserialize, Serialize};

/// The place of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Field {
    /// Its offset in bytes.
    pub offset: u64,
    /// Its size in bytes.
    pub size: u64,
}

/// Layout of a struct or union.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Struct {
    /// `sizeof`
    pub size: u64,
    /// `_Alignof`
    pub align: u64,
    /// Its fields by C name.
    pub fields: BTreeMap<String, Field>,
}

/// The value of a macro or an enumerator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Constant {
    /// A number that is not negative.
    Unsigned(u64),
    /// A negative number.
    Signed(i64),
    /// A string literal.
    Text(String),
}

impl fmt::Display for Constant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Constant::Unsigned(n) => write!(f, "{n}"),
            Constant::Signed(n) => write!(f, "{n}"),
            Constant::Text(text) => write!(f, "{text:?}"),
        }
    }
}

/// The layouts, requests and constants of one generation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// The generation's name.
    pub generation: String,
    /// Structs and unions.
    pub structs: BTreeMap<String, Struct>,
    /// ioctl request values, as hexadecimal text.
    pub requests: BTreeMap<String, String>,
    /// Macros and enumerators.
    pub constants: BTreeMap<String, Constant>,
}

/// One row of a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// What differs, by its C name.
    pub what: String,
    /// The value in our table.
    pub ours: String,
    /// The value in the tree.
    pub tree: String,
}

/// Printed for a missing value.
const ABSENT: &str = "absent";

impl Table {
    /// The differences between our table and the measured one, in the order of the names.
    pub fn differences(&self, tree: &Table) -> Vec<Difference> {
        let mut rows = Vec::new();
        for name in names(&self.structs, &tree.structs) {
            let (Some(ours), Some(theirs)) = (self.structs.get(name), tree.structs.get(name)) else {
                let size = |s: Option<&Struct>| s.map_or(ABSENT.to_owned(), |s| format!("{} bytes", s.size));
                let (ours, tree) = (size(self.structs.get(name)), size(tree.structs.get(name)));
                rows.push(Difference { what: format!("struct {name}"), ours, tree });
                continue;
            };
            let mut row = |what: String, ours: Option<String>, tree: Option<String>| {
                if ours != tree {
                    let [ours, tree] = [ours, tree].map(|side| side.unwrap_or(ABSENT.to_owned()));
                    rows.push(Difference { what, ours, tree });
                }
            };
            row(format!("sizeof {name}"), Some(ours.size.to_string()), Some(theirs.size.to_string()));
            row(format!("alignof {name}"), Some(ours.align.to_string()), Some(theirs.align.to_string()));
            for field in names(&ours.fields, &theirs.fields) {
                let place = |s: &Struct| s.fields.get(field).map(|f| format!("offset {} size {}", f.offset, f.size));
                row(format!("{name}.{field}"), place(ours), place(theirs));
            }
        }
        compare("request", &self.requests, &tree.requests, &mut rows);
        compare("constant", &self.constants, &tree.constants, &mut rows);
        rows
    }

    /// The number of single facts in the table.
    pub fn facts(&self) -> usize {
        let in_structs: usize = self.structs.values().map(|s| 2 + s.fields.len()).sum();
        in_structs + self.requests.len() + self.constants.len()
    }

    /// The table as JSON, always the same for the same facts.
    pub fn to_json(&self) -> String {
        let structs = self.structs.iter().map(|(name, s)| {
            let mut fields: Vec<_> = s.fields.iter().collect();
            fields.sort_by_key(|(name, field)| (field.offset, field.size, name.as_str()));
            let fields = fields.iter().map(|(name, f)| {
                format!("        {}: {{ \"offset\": {}, \"size\": {} }}", quoted(name), f.offset, f.size)
            });
            let fields = braces(fields, "      ");
            let (size, align) = (s.size, s.align);
            format!(
                "    {}: {{\n      \"size\": {size},\n      \"align\": {align},\n      \"fields\": {fields}\n    }}",
                quoted(name)
            )
        });
        let requests = self.requests.iter().map(|(name, value)| format!("    {}: {}", quoted(name), quoted(value)));
        let constants = self.constants.iter().map(|(name, value)| match value {
            Constant::Text(text) => format!("    {}: {}", quoted(name), quoted(text)),
            number => format!("    {}: {number}", quoted(name)),
        });
        format!(
            "{{\n  \"generation\": {},\n  \"structs\": {},\n  \"requests\": {},\n  \"constants\": {}\n}}\n",
            quoted(&self.generation),
            braces(structs, "  "),
            braces(requests, "  "),
            braces(constants, "  "),
        )
    }
}

fn compare<V: PartialEq + fmt::Display>(
    kind: &str,
    ours: &BTreeMap<String, V>,
    tree: &BTreeMap<String, V>,
    rows: &mut Vec<Difference>,
) {
    for name in names(ours, tree) {
        let sides = [ours.get(name), tree.get(name)];
        if sides[0] != sides[1] {
            let [ours, tree] = sides.map(|side| side.map_or(ABSENT.to_owned(), V::to_string));
            rows.push(Difference { what: format!("{kind} {name}"), ours, tree });
        }
    }
}

fn names<'a, V>(one: &'a BTreeMap<String, V>, other: &'a BTreeMap<String, V>) -> BTreeSet<&'a String> {
    one.keys().chain(other.keys()).collect()
}

/// A JSON object from the lines of its members.
fn braces(lines: impl Iterator<Item = String>, indent: &str) -> String {
    let mut text = String::from("{");
    for (at, line) in lines.enumerate() {
        text.push_str(if at == 0 { "\n" } else { ",\n" });
        text.push_str(&line);
    }
    if text.len() > 1 {
        // Writing into a String cannot fail.
        let _ = write!(text, "\n{indent}");
    }
    text.push('}');
    text
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let field = |offset, size| Field { offset, size };
        let fields = [("b".to_owned(), field(0, 4)), ("a".to_owned(), field(4, 8))].into();
        Table {
            generation: "1".into(),
            structs: [("s".to_owned(), Struct { size: 12, align: 4, fields })].into(),
            requests: [("R".to_owned(), "0x00004d00".to_owned())].into(),
            constants: [
                ("N".to_owned(), Constant::Signed(-4)),
                ("T".to_owned(), Constant::Text("SVM".into())),
                ("U".to_owned(), Constant::Unsigned(u64::MAX)),
            ]
            .into(),
        }
    }

    #[test]
    fn written_json_reads_back_as_the_same_table() {
        let table = table();
        let read: Table = serde_json::from_str(&table.to_json()).unwrap();
        assert_eq!(read, table);
        let empty = Table::default();
        assert_eq!(serde_json::from_str::<Table>(&empty.to_json()).unwrap(), empty);
    }

    #[test]
    fn every_kind_of_change_is_one_row() {
        let ours = table();
        let mut tree = table();
        assert_eq!(ours.differences(&tree), []);
        if let Some(s) = tree.structs.get_mut("s") {
            s.fields.insert("new".into(), Field { offset: 12, size: 4 });
            s.fields.remove("b");
            s.size = 16;
        }
        tree.requests.insert("R".into(), "0x00004d01".into());
        tree.constants.remove("T");
        let rows: Vec<_> = ours.differences(&tree).into_iter().map(|d| (d.what, d.ours, d.tree)).collect();
        let expected = [
            ("sizeof s", "12", "16"),
            ("s.b", "offset 0 size 4", "absent"),
            ("s.new", "absent", "offset 12 size 4"),
            ("request R", "0x00004d00", "0x00004d01"),
            ("constant T", "\"SVM\"", "absent"),
        ];
        assert_eq!(rows, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    }
}
