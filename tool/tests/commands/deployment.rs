//! The files for CI and for hosts with NPUs can be read, and every command in them does what it is
//! there for, on an emulated host.

use crate::support::{PROGRAM, schema, stderr, stdout};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use yaml_rust2::{Yaml, YamlLoader};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The only document of a file.
#[track_caller]
fn document(file: &str) -> Yaml {
    let text = fs::read_to_string(root().join(file)).unwrap();
    let mut documents = YamlLoader::load_from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
    assert_eq!(documents.len(), 1, "{file}");
    documents.remove(0)
}

fn items(list: &Yaml) -> &[Yaml] {
    list.as_vec().map_or(&[], Vec::as_slice)
}

fn texts(list: &Yaml) -> Vec<&str> {
    items(list).iter().map(|item| item.as_str().unwrap_or_else(|| panic!("{item:?} is no text"))).collect()
}

/// The keys and values of a mapping.
fn pairs(mapping: &Yaml) -> impl Iterator<Item = (&str, &Yaml)> {
    mapping.as_hash().into_iter().flatten().map(|(key, value)| (key.as_str().unwrap(), value))
}

/// An empty directory for a test.
fn place(name: &str) -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&place);
    fs::create_dir_all(&place).unwrap();
    place
}

/// A command on an emulated host with two NPUs in a container, which must succeed.
#[track_caller]
fn emulated(directory: &Path, command: &[&str]) -> Output {
    let mut emulate = Command::new(PROGRAM);
    emulate.args(["emulate", "--in-container", "0,1", "--"]).args(command).current_dir(directory);
    // The tool is found by its name, as it is after `cargo install`.
    let programs = Path::new(PROGRAM).parent().unwrap().display();
    let output = emulate.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap())).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}\n{}\n{}", output.status, stdout(&output), stderr(&output));
    output
}

/// The nodes without which nothing works.
const NODES: [&str; 3] = ["/dev/davinci_manager", "/dev/hisi_hdc", "/dev/davinci0"];

#[test]
fn the_workflow_for_hosts_collects_everything_that_it_promises() {
    let workflow = document(".github/workflows/ascend-host.yml");
    let job = &workflow["jobs"]["ascend"];
    let options = job["container"]["options"].as_str().unwrap();
    for node in NODES {
        assert!(options.contains(&format!("--device {node}")), "{options}");
    }
    let here = place("workflow");
    let mut ran = 0;
    for step in items(&job["steps"]) {
        // The tool that this test was built with is used in place of an installed one.
        if let Some(run) = step["run"].as_str().filter(|run| !run.starts_with("cargo install")) {
            emulated(&here, &["bash", "-euo", "pipefail", "-c", run]);
            ran += 1;
        }
    }
    assert_eq!(ran, 4);
    let upload = items(&job["steps"]).last().unwrap();
    let files: Vec<&str> = upload["with"]["path"].as_str().unwrap().lines().collect();
    let json = |file: &str| serde_json::from_slice(&fs::read(here.join(file)).unwrap()).unwrap();
    for file in &files {
        match *file {
            "probe.json" => schema::assert_fits("probe", &json(file)),
            "rules.json" => schema::assert_fits("selftest", &json(file)),
            "selftest.xml" => assert!(fs::read_to_string(here.join(file)).unwrap().contains("</testsuite")),
            "trace.jsonl" => assert!(fs::read_to_string(here.join(file)).unwrap().contains("MEM_CREATE")),
            file => panic!("{file} is not known here"),
        }
    }
    assert_eq!(files.len(), 4);
}

#[test]
fn the_job_for_kubernetes_runs_in_a_container_that_has_only_the_tool() {
    let job = document("docs/deploy/job.yaml");
    assert_eq!((job["kind"].as_str(), job["apiVersion"].as_str()), (Some("Job"), Some("batch/v1")));
    let pod = &job["spec"]["template"]["spec"];
    let containers: Vec<&Yaml> = items(&pod["initContainers"]).iter().chain(items(&pod["containers"])).collect();
    let names: Vec<_> = containers.iter().map(|container| container["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["probe", "selftest", "rules"]);
    let here = place("job");
    for container in containers {
        assert_eq!(container["image"].as_str(), Some("ascend-vmm"));
        assert!(pairs(&container["resources"]["limits"]).any(|(name, _)| name.starts_with("huawei.com/Ascend")));
        let mounts: Vec<_> =
            items(&container["volumeMounts"]).iter().map(|mount| mount["mountPath"].as_str()).collect();
        assert_eq!(mounts, [Some("/tmp")]);
        let arguments = texts(&container["args"]);
        let tmp = format!("TMPDIR={}", here.display());
        emulated(&here, &[&["env", "-i", &tmp, PROGRAM], &arguments[..]].concat());
    }
}

#[test]
fn the_files_for_kubernetes_fit_its_own_schemas() {
    const VALIDATOR: &str = "kubernetes-validate";
    if Command::new(VALIDATOR).arg("--version").output().is_err() {
        eprintln!("skipped: there is no {VALIDATOR} here (pip install {VALIDATOR})");
        return;
    }
    for file in ["docs/deploy/job.yaml", "docs/deploy/service.yaml"] {
        for version in ["1.25", "1.31", "1.37"] {
            let mut validator = Command::new(VALIDATOR);
            let checked = validator.args(["--strict", "-k", version]).arg(root().join(file)).output().unwrap();
            assert!(checked.status.success(), "{version}: {}{}", stdout(&checked), stderr(&checked));
        }
    }
}

#[cfg(feature = "service")]
#[test]
fn the_service_for_kubernetes_serves_and_an_engine_is_ready_when_its_weights_are_committed() {
    use crate::service::{Directory, Served, await_front, write_weights};
    use ascend_emulator::{Config, Emulator};

    let text = fs::read_to_string(root().join("docs/deploy/service.yaml")).unwrap();
    let documents = YamlLoader::load_from_str(&text).unwrap();
    let kinds: Vec<_> = documents.iter().map(|it| (it["apiVersion"].as_str(), it["kind"].as_str())).collect();
    assert_eq!(kinds, [(Some("apps/v1"), Some("DaemonSet")), (Some("apps/v1"), Some("Deployment"))]);
    let directory = Directory::new("kubernetes");
    let here = directory.0.to_str().unwrap();
    // A command of a container, with the host's directory in the place of its mount.
    let command = |words: Vec<&str>| -> Command {
        let mut command = Command::new(PROGRAM);
        let words = words.into_iter().filter(|word| *word != "/ascend-vmm");
        command.args(words.map(|word| match word {
            "llama-70b/tp0/weights" => "llama/tp1/weights".to_owned(),
            word => word.replace("/run/ascend-vmm", here),
        }));
        command
    };
    for document in &documents {
        let template = &document["spec"]["template"];
        let labels = &template["metadata"]["labels"];
        assert_eq!(document["spec"]["selector"]["matchLabels"], *labels);
        let pod = &template["spec"];
        assert_eq!(pod["hostPID"].as_bool(), Some(true), "the driver's lists hold numbers of the host");
        let volumes: Vec<_> = items(&pod["volumes"]).iter().map(|volume| volume["name"].as_str().unwrap()).collect();
        for container in items(&pod["initContainers"]).iter().chain(items(&pod["containers"])) {
            for (key, _) in pairs(container) {
                const KNOWN: [&str; 10] = [
                    "name",
                    "image",
                    "args",
                    "command",
                    "env",
                    "resources",
                    "volumeMounts",
                    "securityContext",
                    "startupProbe",
                    "readinessProbe",
                ];
                assert!(KNOWN.contains(&key), "{key} is no field of a container that is used here");
            }
            for mount in items(&container["volumeMounts"]) {
                assert!(volumes.contains(&mount["name"].as_str().unwrap()), "{mount:?}");
            }
        }
    }
    let containers = |document: &Yaml| items(&document["spec"]["template"]["spec"]["containers"]).to_vec();
    let (service, engine) = (containers(&documents[0]), containers(&documents[1]));
    let emulator = Emulator::start(Config::default()).unwrap();
    let mut serve = command(texts(&service[0]["args"]));
    let served = Served(emulator.spawn(serve.stdout(std::process::Stdio::null())).unwrap());
    let socket = directory.0.join("service.sock");
    await_front(&socket, |_| true);
    let succeeds = |words: &Yaml| command(texts(words)).output().unwrap().status.success();
    assert!(succeeds(&service[0]["startupProbe"]["exec"]["command"]));
    assert!(succeeds(&items(&documents[1]["spec"]["template"]["spec"]["initContainers"])[0]["command"]));
    let web = Served(command(texts(&service[1]["args"])).stdout(std::process::Stdio::null()).spawn().unwrap());
    while std::os::unix::net::UnixStream::connect(directory.0.join("web.sock")).is_err() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let follows = Served(command(texts(&engine[1]["args"])).stdout(std::process::Stdio::null()).spawn().unwrap());
    let ready = &engine[1]["readinessProbe"]["exec"]["command"];
    assert!(!succeeds(ready), "nothing is committed");
    write_weights(&emulator, &socket);
    assert!(succeeds(ready), "the weights are committed");
    drop((follows, web, served));
}

#[test]
fn the_image_holds_the_tool_and_starts_it() {
    let text = fs::read_to_string(root().join("docs/deploy/Containerfile")).unwrap();
    let lines: Vec<(&str, &str)> =
        text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' ')).collect();
    let of = |name: &str| lines.iter().filter(|line| line.0 == name).map(|line| line.1).collect::<Vec<_>>();
    assert_eq!(of("FROM"), ["scratch"]);
    assert!(of("RUN").is_empty(), "there is no shell in it");
    // As `cargo xtask dist` names it.
    assert_eq!((of("ARG"), of("COPY")), (vec!["ARCH=aarch64"], vec!["ascend-vmm-${ARCH} /ascend-vmm"]));
    assert_eq!(of("ENTRYPOINT"), ["[\"/ascend-vmm\"]"]);
    let arguments: Vec<String> = serde_json::from_str(of("CMD")[0]).unwrap();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    emulated(&place("image"), &[&["env", "-i", PROGRAM], &arguments[..]].concat());
}

#[test]
fn every_other_workflow_runs_what_is_there() {
    let ci = document(".github/workflows/ci.yml");
    let runs = |job: &Yaml| -> Vec<String> {
        items(&job["steps"]).iter().filter_map(|step| step["run"].as_str().map(str::to_owned)).collect()
    };
    assert!(runs(&ci["jobs"]["run"]).iter().any(|run| run == ".ci/run"));
    assert!(root().join(".ci/run").exists());

    let release = document(".github/workflows/release.yml");
    let jobs: Vec<&str> = pairs(&release["jobs"]).map(|(name, _)| name).collect();
    for needed in texts(&release["jobs"]["draft"]["needs"]) {
        assert!(jobs.contains(&needed), "{needed} is no job");
    }
}

#[test]
fn issue_templates_ask_for_what_probe_and_trace_say() {
    let mut forms = 0;
    for entry in fs::read_dir(root().join(".github/ISSUE_TEMPLATE")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let form = document(&format!(".github/ISSUE_TEMPLATE/{name}"));
        if name == "config.yml" {
            continue;
        }
        forms += 1;
        for field in ["name", "description"] {
            assert!(form[field].as_str().is_some_and(|text| !text.is_empty()), "{name} has no {field}");
        }
        let asked = format!("{form:?}");
        for command in ["probe --open --json", "trace --quiet --anonymise --json trace.jsonl"] {
            assert!(asked.contains(command), "{name} does not ask for `{command}`");
        }
    }
    assert_eq!(forms, 2);
}

/// The script of the action and of the template for GitLab, with a command for it.
fn on_emulated_npus(command: &str, github: bool) -> Output {
    let mut script = Command::new("sh");
    script.arg(root().join(".github/actions/emulated-npu/run.sh"));
    script.env("TOOL", PROGRAM).env("COMMAND", command).env("GENERATIONS", "8.5.0 26.1").env("OPTIONS", "--devices 3");
    script.env_remove("GITHUB_ACTIONS").env_remove("SEEDS");
    if github {
        script.env("GITHUB_ACTIONS", "true");
    }
    script.output().unwrap()
}

#[test]
fn the_action_runs_a_command_on_each_generation_and_annotates_what_is_left() {
    let action = document(".github/actions/emulated-npu/action.yml");
    let environment: Vec<&str> = pairs(&action["runs"]["steps"][1]["env"]).map(|(name, _)| name).collect();
    assert_eq!(environment, ["COMMAND", "GENERATIONS", "SEEDS", "OPTIONS", "TOOL"]);
    let template = document("docs/deploy/emulated-npu.gitlab-ci.yml");
    let script = texts(&template[".emulated-npu"]["script"]).concat();
    assert!(script.ends_with(".github/actions/emulated-npu/run.sh"), "{script}");

    let clean = on_emulated_npus("test -e /dev/davinci2 && echo here", true);
    assert!(clean.status.success(), "{}", stderr(&clean));
    assert_eq!(stdout(&clean), "here\nhere\n");
    let leaky = "sleep 60 3<>/dev/davinci_manager & exit 0";
    for (github, start) in
        [(true, "::error title=driver 8.5.0 with seed 0::"), (false, "error: driver 8.5.0 with seed 0: ")]
    {
        let output = on_emulated_npus(leaky, github);
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let open = format!("{start}/dev/davinci_manager is open, opened by process ");
        assert!(text.contains(&open) && text.contains(&format!("{start}the run ended with 1")), "{text}");
    }
}
