//! `cargo xtask abi`: exit statuses, rows and error messages.
//!
//! The driver's sources are not part of this repository, so the trees here are written from our own
//! tables: headers that declare what a table says, in the places where the driver's tree has them.

use crate::support::{PROGRAM, stderr, stdout};
use ascend_ioctl::Generation;
use serde_json::{Map, Value};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const MEMORY_HEADER: &str = "src/sdk_driver/svm/v2/command/ioctl/svm_ioctl.h";

/// The other files that a driver tree must have. They may be empty: the memory header declares
/// everything.
const OTHER_HEADERS: [&str; 17] = [
    "src/sdk_driver/inc/davinci_interface.h",
    "src/sdk_driver/pbl/uda/command/ioctl/ascend_dev_num.h",
    "src/sdk_driver/pbl/uda/command/ioctl/uda_cmd.h",
    "src/sdk_driver/pbl/dev_urd/command/ioctl/urd_ioctl.h",
    "src/sdk_driver/dms/command/ioctl/dms_ioctl.h",
    "src/sdk_driver/dms/command/ioctl/dms_urd_forward_uk_msg.h",
    "src/sdk_driver/hdc/command/ioctl/hdcdrv_cmd_ioctl.h",
    "src/sdk_driver/hdc/inc/hdcdrv_cmd_enum.h",
    "src/sdk_driver/trsdrv/trs/inc/trs_ioctl.h",
    "src/sdk_driver/esched/command/ioctl/esched_ioctl.h",
    "src/ascend_hal/dmc/logdrv/drv_share_log.c",
    "src/ascend_hal/dms/drv_devmng/inc/devmng_cmd_def.h",
    "src/ascend_hal/inc/devdrv_user_common.h",
    "src/ascend_hal/inc/dms/dms_devdrv_info_comm.h",
    "src/ascend_hal/inc/dms/dms_soc_interface.h",
    "pkg_inc/ascend_hal.h",
    "pkg_inc/dsmi_common_interface.h",
];

/// A directory that is removed when the test ends.
struct Tree(PathBuf);

impl Tree {
    fn empty(name: &str) -> Tree {
        let path = std::env::temp_dir().join(format!("ascend-abi-test-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Tree(path)
    }

    /// A tree whose headers declare what `table` says.
    fn of(name: &str, table: &Value) -> Tree {
        let tree = Tree::empty(name);
        for path in OTHER_HEADERS {
            tree.write(path, "");
        }
        tree.write(MEMORY_HEADER, &header(table));
        tree
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn table(generation: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../ioctl/abi/{generation}.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn object<'a>(value: &'a Value, part: &str) -> &'a Map<String, Value> {
    value[part].as_object().unwrap()
}

/// C declarations with the layouts of the table.
fn header(table: &Value) -> String {
    let mut code = String::from("#pragma once\n");
    for (name, layout) in object(table, "structs") {
        let mut fields: Vec<(&str, u64, u64)> = object(layout, "fields")
            .iter()
            .map(|(name, field)| (name.as_str(), field["offset"].as_u64().unwrap(), field["size"].as_u64().unwrap()))
            .collect();
        fields.sort_by_key(|field| field.1);
        let _ = writeln!(code, "struct {name} {{");
        let mut end = 0;
        // Fields in the same place are views of a union, or bit-fields of one byte.
        for group in fields.chunk_by(|one, other| one.1 == other.1) {
            (end..group[0].1).for_each(|_| code.push_str("    unsigned char : 8;\n"));
            code.push_str("    union {\n");
            for (field, offset, size) in group {
                let _ = writeln!(code, "        unsigned char {field}[{size}];");
                end = end.max(offset + size);
            }
            code.push_str("    };\n");
        }
        (end..layout["size"].as_u64().unwrap()).for_each(|_| code.push_str("    unsigned char : 8;\n"));
        let _ = writeln!(code, "}} __attribute__((packed, aligned({})));", layout["align"]);
    }
    for (name, value) in object(table, "requests") {
        let _ = writeln!(code, "#define {name} ({}U)", value.as_str().unwrap());
    }
    code.push_str("enum commands {\n");
    for (name, value) in object(table, "constants").iter().filter(|(name, _)| name.starts_with("HDCDRV_CMD_")) {
        let _ = writeln!(code, "    {name} = {value},");
    }
    code.push_str("};\n");
    for (name, value) in object(table, "constants").iter().filter(|(name, _)| !name.starts_with("HDCDRV_CMD_")) {
        let _ = writeln!(code, "#define {name} ({value})");
    }
    code
}

fn abi(arguments: &[&str], tree: &Path) -> Output {
    let mut command = Command::new(PROGRAM);
    command.arg("abi").arg(arguments[0]).arg("--driver-src").arg(tree).args(&arguments[1..]);
    command.output().unwrap()
}

/// The error of a comparison that is not possible: one line.
fn refusal(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = stderr(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn the_generation_of_a_tree_is_recognised() {
    for generation in Generation::ALL.map(Generation::name) {
        let tree = Tree::of(&format!("same-{generation}"), &table(generation));
        let output = abi(&["check"], &tree.0);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(stdout(&output).starts_with(&format!("generation {generation} (fits best): no difference")));
    }
}

#[test]
fn a_dump_of_a_tree_is_the_table_byte_for_byte() {
    let tree = Tree::of("dump", &table("26.1"));
    let output = abi(&["dump", "--generation", "26.1"], &tree.0);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ioctl/abi/26.1.json");
    let table = fs::read_to_string(path).unwrap();
    let differs =
        stdout(&output).lines().zip(table.lines()).find(|(dumped, kept)| dumped != kept).map(|(d, _)| d.to_owned());
    assert_eq!(differs, None);
    assert_eq!(stdout(&output).len(), table.len());
}

#[test]
fn each_difference_is_a_row_and_the_exit_status_is_1() {
    let mut changed = table("9.0.0");
    changed["structs"]["devmm_mem_create_para"]["fields"]["id"]["size"] = 8.into();
    changed["requests"]["DEVMM_SVM_ALLOC"] = "0x41584dff".into();
    changed["constants"].as_object_mut().unwrap().remove("MEM_HUGE_PAGE_TYPE");
    let tree = Tree::of("changed", &changed);
    tree.write(MEMORY_HEADER, &format!("{}\n#define DEVMM_SVM_NEWS _IO('M', 99)\n", header(&changed)));
    let output = abi(&["check", "--generation", "9.0.0"], &tree.0);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = stdout(&output);
    let row = |words: &[&str]| text.lines().any(|line| line.split_whitespace().eq(words.iter().copied()));
    assert!(row(&["request", "DEVMM_SVM_ALLOC", "0x41584d03", "0x41584dff"]), "{text}");
    assert!(row(&["request", "DEVMM_SVM_NEWS", "absent", "0x00004d63"]), "{text}");
    assert!(row(&["constant", "MEM_HUGE_PAGE_TYPE", "1", "absent"]), "{text}");
    assert!(text.contains("devmm_mem_create_para.id"), "{text}");
}

#[test]
fn a_single_difference_is_counted_in_the_singular() {
    let mut changed = table("9.0.0");
    changed["requests"]["DEVMM_SVM_ALLOC"] = "0x41584dff".into();
    let output = abi(&["check"], &Tree::of("one-change", &changed).0);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(stdout(&output).lines().next(), Some("generation 9.0.0 (fits best): 1 difference"));
}

#[test]
fn a_chosen_generation_is_used_even_if_another_fits_better() {
    let tree = Tree::of("chosen", &table("26.1"));
    let output = abi(&["check", "--generation", "8.5.0"], &tree.0);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("request DEVMM_SVM_MEM_HANDLE_SET_ATTR"));
}

#[test]
fn a_missing_directory_is_refused_with_exit_2() {
    let error = refusal(&abi(&["check"], Path::new("/no/such/directory")));
    assert!(error.contains("/no/such/directory: No such file or directory"), "{error}");
    let error = refusal(&abi(&["dump"], Path::new(PROGRAM)));
    assert!(error.contains("is not a directory"), "{error}");
}

#[test]
fn a_directory_that_is_not_a_driver_tree_is_refused_with_exit_2() {
    let tree = Tree::empty("no-tree");
    let error = refusal(&abi(&["check"], &tree.0));
    assert!(error.contains("is not a driver source tree: it has no src/sdk_driver/svm"), "{error}");
    tree.write(MEMORY_HEADER, "");
    let error = refusal(&abi(&["check"], &tree.0));
    assert!(error.contains("the tree has no src/sdk_driver/inc/davinci_interface.h"), "{error}");
}

#[test]
fn headers_that_do_not_compile_are_refused_with_exit_2() {
    let tree = Tree::of("broken", &table("26.1"));
    tree.write(MEMORY_HEADER, "#error not today\n");
    let error = refusal(&abi(&["check"], &tree.0));
    assert!(error.contains("the headers of the memory do not compile") && error.contains("not today"));
}

#[test]
fn a_missing_compiler_is_refused_with_exit_2() {
    let tree = Tree::of("no-compiler", &table("26.1"));
    let mut command = Command::new(PROGRAM);
    command.args(["abi", "check", "--driver-src"]).arg(&tree.0).env("CC", "no-such-compiler");
    let error = refusal(&command.output().unwrap());
    assert!(error.contains("no C compiler found (tried no-such-compiler)"), "{error}");
    let mut command = Command::new(PROGRAM);
    command.args(["abi", "check", "--driver-src"]).arg(&tree.0).env_remove("CC").env("PATH", "/no/such/path");
    let error = refusal(&command.output().unwrap());
    assert!(error.contains("no C compiler found (tried cc, gcc, clang)"), "{error}");
}

#[test]
fn an_included_header_is_found_wherever_the_tree_keeps_it() {
    let tree = Tree::of("moved", &table("9.0.0"));
    tree.write("src/sdk_driver/elsewhere/deep/moved.h", &header(&table("9.0.0")));
    tree.write(MEMORY_HEADER, "#include \"deep/moved.h\"\n");
    assert_eq!(abi(&["check"], &tree.0).status.code(), Some(0));
}
