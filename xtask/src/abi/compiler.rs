//! Measures the layouts that a driver tree declares, with the C compiler of the system.
//!
//! For each unit of headers, the preprocessor lists the names. Then a small program is written that
//! includes the same headers and prints sizes, offsets and values. It is compiled and run, and its
//! output becomes a [`Table`]. The program contains only names and `#include` lines of the driver.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::declarations::{Declarations, Kind, Member};
use super::driver_tree::{DEFINES, DriverTree, UNITS, Unit};
use super::layout_table::{Constant, Field, Table};

/// The C names to look for.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Structs and unions, by tag or typedef name.
    pub structs: BTreeSet<String>,
    /// ioctl requests.
    pub requests: BTreeSet<String>,
    /// Macros and enumerators.
    pub constants: BTreeSet<String>,
}

/// Headers that the driver's headers need but do not include.
const PRELUDE: &str = "\
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/types.h>
#include <linux/types.h>
";

/// The functions and macros of the program that print.
const PRINTERS: &str = r#"
static void probe_number(const char *name, __int128 value)
{
    if (value < 0)
        printf("N %s %lld\n", name, (long long)value);
    else
        printf("N %s %llu\n", name, (unsigned long long)value);
}
static void probe_text(const char *name, const char *value) { printf("T %s %s\n", name, value); }
static void probe_bits(const char *type, const char *field, const unsigned char *bytes, size_t size)
{
    size_t first = 0, end = size;
    while (first < size && !bytes[first])
        first++;
    while (end > first && !bytes[end - 1])
        end--;
    printf("F %s %s %zu %zu\n", type, field, first, end - first);
}
#define PROBE_STRUCT(name, type) printf("S %s %zu %zu\n", name, sizeof(type), _Alignof(type))
#define PROBE_FIELD(name, type, field) \
    printf("F %s %s %zu %zu\n", name, #field, offsetof(type, field), sizeof(((type *)0)->field))
#define PROBE_OPEN(name, type, field) printf("F %s %s %zu 0\n", name, #field, offsetof(type, field))
#define PROBE_BITS(name, type, field)                                                                                  \
    do {                                                                                                               \
        type probe;                                                                                                    \
        memset(&probe, 0, sizeof(probe));                                                                              \
        probe.field = ~0;                                                                                              \
        probe_bits(name, #field, (const unsigned char *)&probe, sizeof(probe));                                        \
    } while (0)
#define PROBE_REQUEST(name, value) printf("R %s 0x%08x\n", name, (unsigned int)(value))
#define PROBE_CONSTANT(name, value) _Generic((value), char *: probe_text, default: probe_number)(name, value)
"#;

/// Measures what `tree` declares of `wanted`, and all other requests that it declares.
pub fn measure(tree: &DriverTree, wanted: &Wanted) -> Result<Table, String> {
    let directory = Scratch::new()?;
    let compiler = Compiler::find()?;
    let mut table = Table::default();
    for unit in &UNITS {
        let mut probe = Probe { tree, compiler: &compiler, directory: &directory.0, include: Vec::new() };
        probe.measure(unit, wanted, &mut table)?;
    }
    Ok(table)
}

/// The C compiler's command.
struct Compiler(String);

impl Compiler {
    /// `$CC`, or the first compiler that the system has.
    fn find() -> Result<Compiler, String> {
        let named = std::env::var("CC").ok().filter(|name| !name.is_empty());
        let candidates = named.map_or(vec!["cc".to_owned(), "gcc".to_owned(), "clang".to_owned()], |name| vec![name]);
        for name in &candidates {
            match Command::new(name).arg("--version").output() {
                Ok(output) if output.status.success() => return Ok(Compiler(name.clone())),
                Ok(_) => return Err(format!("the C compiler {name} does not work: `{name} --version` fails")),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(format!("the C compiler {name} cannot be run: {error}")),
            }
        }
        Err(format!("no C compiler found (tried {}); install one or name it in CC", candidates.join(", ")))
    }
}

/// A temporary directory that is removed when this is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, String> {
        for attempt in 0..100 {
            let path = std::env::temp_dir().join(format!("ascend-abi-{}-{attempt}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Scratch(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(format!("{}: {error}", path.display())),
            }
        }
        Err("no free name for a temporary directory".to_owned())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that is left behind does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The probe of one unit.
struct Probe<'a> {
    tree: &'a DriverTree,
    compiler: &'a Compiler,
    directory: &'a Path,
    include: Vec<PathBuf>,
}

impl Probe<'_> {
    fn measure(&mut self, unit: &Unit, wanted: &Wanted, table: &mut Table) -> Result<(), String> {
        let mut program = String::from(PRELUDE);
        for header in self.tree.headers(unit)? {
            let _ = writeln!(program, "#include \"{}\"", header.display());
        }
        self.include = unit.include.iter().map(|directory| self.tree.root().join(directory)).collect();
        if !unit.foreign.is_empty() {
            self.include.push(self.directory.to_owned());
        }
        for header in unit.foreign {
            self.write(header, "")?;
        }
        let declarations = self.preprocess(unit, &program)?;
        let questions = questions(&declarations, unit, wanted, table);
        if questions.is_empty() {
            return Ok(());
        }
        let _ = write!(program, "{PRINTERS}int main(void)\n{{\n{questions}    return 0;\n}}\n");
        self.answers(unit, &program, table)
    }

    /// Runs the preprocessor, adding directories until every include is found.
    fn preprocess(&mut self, unit: &Unit, program: &str) -> Result<Declarations, String> {
        let source = self.write("names.c", program)?;
        // Each round adds one directory. No real chain of includes is that long.
        for _ in 0..64 {
            let output = self.compile(&["-E", "-dD"], &source)?;
            if output.status.success() {
                return Ok(Declarations::scan(&String::from_utf8_lossy(&output.stdout), self.tree.root()));
            }
            let error = first_error(&output);
            let directory = missing_header(&error).and_then(|header| self.tree.directory_with(header));
            match directory {
                Some(directory) if !self.include.contains(&directory) => self.include.push(directory),
                _ => return Err(format!("the headers of the {} do not compile: {error}", unit.name)),
            }
        }
        Err(format!("the headers of the {} need too many include directories", unit.name))
    }

    fn answers(&self, unit: &Unit, program: &str, table: &mut Table) -> Result<(), String> {
        let source = self.write("probe.c", program)?;
        let binary = self.directory.join("probe");
        // Functions of the tree call others that are not defined. The program calls none of them,
        // so the linker can drop them.
        let name = binary.to_string_lossy();
        let options = ["-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-o", &name];
        let output = self.compile(&options, &source)?;
        if !output.status.success() {
            return Err(format!("the probe of the {} does not compile: {}", unit.name, first_error(&output)));
        }
        let answer = Command::new(&binary).output().map_err(|error| format!("the probe cannot be run: {error}"))?;
        if !answer.status.success() {
            return Err(format!("the probe of the {} failed: {}", unit.name, answer.status));
        }
        for line in String::from_utf8_lossy(&answer.stdout).lines() {
            add(line, table).ok_or_else(|| format!("the probe of the {} printed {line:?}", unit.name))?;
        }
        Ok(())
    }

    fn compile(&self, options: &[&str], source: &Path) -> Result<Output, String> {
        let mut command = Command::new(&self.compiler.0);
        command.env("LC_ALL", "C").args(["-std=gnu11", "-w"]);
        command.args(DEFINES.iter().map(|name| format!("-D{name}")));
        for directory in &self.include {
            command.arg("-I").arg(directory);
        }
        command.args(options).arg(source);
        command.output().map_err(|error| format!("the C compiler {} cannot be run: {error}", self.compiler.0))
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.directory.join(name);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }
}

/// The statements that print what `declarations` has of `wanted` and the table still lacks.
fn questions(declarations: &Declarations, unit: &Unit, wanted: &Wanted, table: &Table) -> String {
    let mut code = String::new();
    for (name, aggregate) in &declarations.aggregates {
        if !wanted.structs.contains(name) || table.structs.contains_key(name) {
            continue;
        }
        let spelling = &aggregate.spelling;
        let _ = writeln!(code, "    PROBE_STRUCT(\"{name}\", {spelling});");
        for Member { name: field, kind } in &aggregate.members {
            let question = match kind {
                Kind::Plain => "PROBE_FIELD",
                Kind::BitField => "PROBE_BITS",
                Kind::OpenArray => "PROBE_OPEN",
            };
            let _ = writeln!(code, "    {question}(\"{name}\", {spelling}, {field});");
        }
    }
    for (name, body) in &declarations.macros {
        let is_request =
            unit.all_requests && ["_IO(", "_IOR(", "_IOW(", "_IOWR("].iter().any(|call| body.contains(call));
        if (wanted.requests.contains(name) || is_request) && !table.requests.contains_key(name) {
            let _ = writeln!(code, "    PROBE_REQUEST(\"{name}\", {name});");
        }
    }
    // The requests of the host-device channel are enumerators: only the number, without the other
    // bits of a request.
    let numbers = declarations.enumerators.iter().filter(|name| wanted.requests.contains(*name));
    let constants = declarations.macros.keys().chain(&declarations.enumerators);
    let constants = constants.filter(|name| wanted.constants.contains(*name));
    for name in numbers.chain(constants).filter(|name| !table.constants.contains_key(*name)) {
        let _ = writeln!(code, "    PROBE_CONSTANT(\"{name}\", {name});");
    }
    code
}

/// Adds one line of the program's output to the table.
fn add(line: &str, table: &mut Table) -> Option<()> {
    let mut words = line.splitn(3, ' ');
    let (kind, name, rest) = (words.next()?, words.next()?, words.next()?);
    match kind {
        "S" => {
            let (size, align) = rest.split_once(' ')?;
            let entry = table.structs.entry(name.to_owned()).or_default();
            (entry.size, entry.align) = (size.parse().ok()?, align.parse().ok()?);
        }
        "F" => {
            let mut words = rest.split(' ');
            let (field, offset, size) = (words.next()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            table.structs.get_mut(name)?.fields.insert(field.to_owned(), Field { offset, size });
        }
        "R" => {
            table.requests.insert(name.to_owned(), rest.to_owned());
        }
        "N" => {
            let value = rest.parse().map(Constant::Unsigned).or_else(|_| rest.parse().map(Constant::Signed)).ok()?;
            table.constants.insert(name.to_owned(), value);
        }
        "T" => {
            table.constants.insert(name.to_owned(), Constant::Text(rest.to_owned()));
        }
        _ => return None,
    }
    Some(())
}

/// The header that is missing according to a compiler error of gcc or clang.
fn missing_header(error: &str) -> Option<&str> {
    let end = [" file not found", ": No such file or directory"].iter().find_map(|words| error.find(words))?;
    error[..end].rsplit(' ').next().map(|header| header.trim_matches(['\'', '"']))
}

fn first_error(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains("error")).or_else(|| text.lines().next());
    line.unwrap_or("the compiler printed no error").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_header_is_read_from_errors_of_gcc_and_clang() {
        assert_eq!(missing_header("a.h:6:10: fatal error: pbl/x.h: No such file or directory"), Some("pbl/x.h"));
        assert_eq!(missing_header("a.h:6:10: fatal error: 'pbl/x.h' file not found"), Some("pbl/x.h"));
        assert_eq!(missing_header("a.h:6:10: error: unknown type name 'u8'"), None);
    }

    #[test]
    fn an_unknown_line_of_output_is_refused() {
        let mut table = Table::default();
        assert_eq!(add("S s 8 4", &mut table), Some(()));
        assert_eq!(add("F s a 0 4", &mut table), Some(()));
        assert_eq!(add("F other a 0 4", &mut table), None);
        assert_eq!(add("N x y", &mut table), None);
        assert_eq!(table.structs["s"].fields["a"], Field { offset: 0, size: 4 });
    }
}
