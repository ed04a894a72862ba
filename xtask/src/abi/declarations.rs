//! The names that a preprocessed C header declares, without any layout.
//!
//! A program can print the offset of a field, but cannot list the fields. So the output of the
//! preprocessor is scanned for the members of each struct and union, for enumerators and for
//! macros. All numbers come from the compiler. Only files of the driver tree are scanned (the
//! preprocessor marks the file of each line), so structs of the C library are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How a member can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// By `offsetof` and `sizeof`.
    Plain,
    /// It has no address. Its position is found by setting all its bits.
    BitField,
    /// A flexible array member: it has an offset and no size.
    OpenArray,
}

/// One member of a struct or union.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The member's name.
    pub name: String,
    /// How to measure it.
    pub kind: Kind,
}

/// A struct or union with its members in the order of declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aggregate {
    /// How C code names the type: `struct x`, `union x`, or a typedef's bare name.
    pub spelling: String,
    /// Its members, including those of unnamed inner structs and unions, as in C.
    pub members: Vec<Member>,
}

/// The names that a header declares.
#[derive(Debug, Default)]
pub struct Declarations {
    /// Structs and unions by tag or typedef name.
    pub aggregates: BTreeMap<String, Aggregate>,
    /// Enumerators.
    pub enumerators: BTreeSet<String>,
    /// Macros without parameters, with their bodies.
    pub macros: BTreeMap<String, String>,
}

impl Declarations {
    /// Scans the output of `cc -E -dD`, keeping what comes from files under `root`.
    pub fn scan(preprocessed: &str, root: &Path) -> Declarations {
        let mut found = Declarations::default();
        let mut code = String::new();
        let mut inside = false;
        for line in preprocessed.lines() {
            let Some(directive) = line.strip_prefix('#') else {
                if inside {
                    code.push_str(line);
                    code.push('\n');
                }
                continue;
            };
            if let Some(definition) = directive.strip_prefix("define ") {
                if inside {
                    found.define(definition);
                }
            } else if let Some(name) = directive.strip_prefix("undef ") {
                found.macros.remove(name.trim());
            } else if let Some(path) = directive.split('"').nth(1) {
                inside = Path::new(path).starts_with(root);
            }
        }
        let tokens = tokens(&code);
        found.declarations(&tokens);
        found
    }

    fn define(&mut self, definition: &str) {
        let end = definition.find(|c: char| !is_word(c)).unwrap_or(definition.len());
        let (name, body) = definition.split_at(end);
        // A parenthesis directly after the name makes it a macro with parameters, which has no
        // value.
        if !body.starts_with('(') && !body.trim().is_empty() {
            self.macros.insert(name.to_owned(), body.trim().to_owned());
        }
    }

    fn declarations(&mut self, tokens: &[&str]) {
        let mut at = 0;
        while at < tokens.len() {
            let end = at + statement_length(&tokens[at..]);
            self.declaration(&tokens[at..end]);
            at = end;
        }
    }

    /// One declaration at file scope, without attributes.
    fn declaration(&mut self, tokens: &[&str]) {
        let tokens = without_attributes(tokens);
        let Some(keyword) = tokens.iter().position(|t| matches!(*t, "struct" | "union" | "enum")) else { return };
        let Some(definition) = Definition::parse(&tokens[keyword..]) else { return };
        let is_typedef = tokens.first() == Some(&"typedef");
        let typedef =
            definition.rest.iter().find(|t| is_name(t)).filter(|_| is_typedef && !definition.rest.contains(&"*"));
        self.register(&definition, typedef.copied());
    }

    /// Adds a definition, and the definitions inside it, under its tag and its typedef name.
    /// Returns its members.
    fn register(&mut self, definition: &Definition<'_>, typedef: Option<&str>) -> Vec<Member> {
        if definition.keyword == "enum" {
            for enumerator in definition.body.split(|t| *t == ",") {
                self.enumerators.extend(enumerator.first().filter(|t| is_name(t)).map(|t| (*t).to_owned()));
            }
            return Vec::new();
        }
        let members = self.members(definition.body);
        if let Some(tag) = definition.tag {
            let spelling = format!("{} {tag}", definition.keyword);
            self.aggregates.insert(tag.to_owned(), Aggregate { spelling, members: members.clone() });
        }
        if let Some(name) = typedef {
            let aggregate = Aggregate { spelling: name.to_owned(), members: members.clone() };
            self.aggregates.entry(name.to_owned()).or_insert(aggregate);
        }
        members
    }

    fn members(&mut self, body: &[&str]) -> Vec<Member> {
        let mut members = Vec::new();
        let mut at = 0;
        while at < body.len() {
            let end = at + statement_length(&body[at..]);
            let statement = without_attributes(body[at..end].strip_suffix(&[";"]).unwrap_or(&body[at..end]));
            at = end;
            let inner = statement.iter().position(|t| matches!(*t, "struct" | "union" | "enum"));
            match inner.and_then(|at| Definition::parse(&statement[at..])) {
                Some(definition) => {
                    let flattened = self.register(&definition, None);
                    if definition.rest.is_empty() && definition.tag.is_none() {
                        members.extend(flattened);
                    } else {
                        members.extend(declarators(&definition.rest));
                    }
                }
                None => members.extend(declarators(&statement)),
            }
        }
        members
    }
}

/// `struct TAG { body } rest`
struct Definition<'a> {
    keyword: &'a str,
    tag: Option<&'a str>,
    body: &'a [&'a str],
    rest: Vec<&'a str>,
}

impl<'a> Definition<'a> {
    fn parse(tokens: &'a [&'a str]) -> Option<Definition<'a>> {
        let keyword = *tokens.first()?;
        let tag = tokens.get(1).copied().filter(|t| is_name(t));
        let open = if tag.is_some() { 2 } else { 1 };
        if tokens.get(open) != Some(&"{") {
            return None;
        }
        let close = open + closing(&tokens[open..])?;
        let rest = tokens[close + 1..].iter().copied().filter(|t| *t != ";").collect();
        Some(Definition { keyword, tag, body: &tokens[open + 1..close], rest })
    }
}

/// The names that `type a, *b, c[4], d : 3, (*e)(int)` declares, without the words of the type.
fn declarators(tokens: &[&str]) -> Vec<Member> {
    let mut members = Vec::new();
    let mut depth = 0;
    let parts = tokens.split(|t| {
        match *t {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        depth == 0 && *t == ","
    });
    for part in parts {
        let pointer_to_function = part.windows(2).position(|w| w == ["(", "*"]).and_then(|at| part.get(at + 2));
        let end = part.iter().position(|t| matches!(*t, "[" | ":" | "=")).unwrap_or(part.len());
        let name = pointer_to_function.or_else(|| part[..end].last()).filter(|t| is_name(t) && !is_type_word(t));
        let kind = match part {
            _ if part.contains(&":") => Kind::BitField,
            _ if part.windows(2).any(|w| w == ["[", "]"]) => Kind::OpenArray,
            _ => Kind::Plain,
        };
        members.extend(name.map(|name| Member { name: (*name).to_owned(), kind }));
    }
    members
}

/// The length of the statement that starts here, including its `;` or the body of a function.
fn statement_length(tokens: &[&str]) -> usize {
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at] {
            ";" => return at + 1,
            "{" => {
                let is_function = at > 0 && tokens[at - 1] == ")";
                at += closing(&tokens[at..]).unwrap_or(tokens.len() - at - 1);
                if is_function {
                    return at + 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    tokens.len()
}

/// The index of the bracket that closes the first one.
fn closing(tokens: &[&str]) -> Option<usize> {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match *token {
            "(" | "{" | "[" => depth += 1,
            ")" | "}" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

fn without_attributes<'a>(tokens: &[&'a str]) -> Vec<&'a str> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if matches!(tokens[at], "__attribute__" | "__attribute" | "_Alignas" | "__extension__") {
            at += 1;
            if tokens.get(at) == Some(&"(") {
                at += closing(&tokens[at..]).unwrap_or(0) + 1;
            }
        } else {
            kept.push(tokens[at]);
            at += 1;
        }
    }
    kept
}

fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if is_word(first) {
            rest.find(|c| !is_word(c)).unwrap_or(rest.len())
        } else if first == '"' || first == '\'' {
            quoted_length(rest, first)
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(length);
        tokens.push(token);
        rest = after.trim_start();
    }
    tokens
}

fn quoted_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_ascii_alphanumeric()
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic())
}

/// Whether this is a type, as before the colon of an unnamed bit-field.
fn is_type_word(token: &str) -> bool {
    matches!(token, "unsigned" | "signed" | "char" | "short" | "int" | "long")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(code: &str) -> Declarations {
        Declarations::scan(&format!("# 1 \"/tree/a.h\" 1\n{code}"), Path::new("/tree"))
    }

    fn members(declarations: &Declarations, name: &str) -> Vec<String> {
        declarations.aggregates[name].members.iter().map(|m| m.name.clone()).collect()
    }

    #[test]
    fn members_of_every_declarator_form_are_found() {
        let found = scan(
            "struct s { unsigned int a, *b; char c[4][8]; int (*d)(int, long); struct t e; } __attribute__((packed));",
        );
        assert_eq!(members(&found, "s"), ["a", "b", "c", "d", "e"]);
        assert_eq!(found.aggregates["s"].spelling, "struct s");
    }

    #[test]
    fn members_of_an_unnamed_union_belong_to_the_outer_struct() {
        let found = scan("struct s { int a; union { int b; struct { int c; char d; }; }; union { int x; } e; };");
        assert_eq!(members(&found, "s"), ["a", "b", "c", "d", "e"]);
    }

    #[test]
    fn a_named_inner_struct_is_a_type_of_its_own() {
        let found = scan("struct s { struct inner { int a; } i[2]; };");
        assert_eq!(members(&found, "s"), ["i"]);
        assert_eq!(members(&found, "inner"), ["a"]);
    }

    #[test]
    fn bit_fields_and_open_arrays_are_marked() {
        let found = scan("struct s { unsigned a : 3; unsigned : 5; unsigned b; char c[]; };");
        let kinds: Vec<_> = found.aggregates["s"].members.iter().map(|m| (m.name.as_str(), m.kind)).collect();
        assert_eq!(kinds, [("a", Kind::BitField), ("b", Kind::Plain), ("c", Kind::OpenArray)]);
    }

    #[test]
    fn typedef_names_and_enumerators_are_found() {
        let found = scan(
            "typedef struct { int a; } t; typedef enum kind { A = 1 << 2, B, } kind_t; \
             static int f(void) { return 1; } union u { int z; };",
        );
        assert_eq!(found.aggregates["t"].spelling, "t");
        assert_eq!(found.enumerators.iter().collect::<Vec<_>>(), ["A", "B"]);
        assert_eq!(members(&found, "u"), ["z"]);
    }

    #[test]
    fn only_files_of_the_tree_are_scanned() {
        let text = "# 1 \"/usr/include/x.h\" 1\nstruct libc { int a; };\n#define LIBC 1\n\
                    # 2 \"/tree/a.h\" 2\n#define OURS 0x10\n#define CALL(x) x\n#define EMPTY\n\
                    #define GONE 1\n#undef GONE\n";
        let found = Declarations::scan(text, Path::new("/tree"));
        assert!(found.aggregates.is_empty());
        assert_eq!(found.macros.into_iter().collect::<Vec<_>>(), [("OURS".to_owned(), "0x10".to_owned())]);
    }
}
