//! Finding devices, and the findings when there are none, on every kind of host that the emulated
//! driver can be.

use crate::support::processes::start;
use crate::support::raw::ModuleFile;
use crate::support::{Directory, assert_nothing_left, commands, inject, own_pid, survey_options, without};
use ascend_emulator::config::{Door, Phase, Place};
use ascend_emulator::record::Record;
use ascend_emulator::{Config, isolated, isolated_leaky, on_each_generation};
use ascend_ioctl::{Generation, davinci, uda};
use ascend_vmm::discovery::{self, DeviceState, Environment, Finding, Health, MemoryDriver, Severity, Split, Survey};
use ascend_vmm::error::Errno;
use ascend_vmm::{LogicalId, PhysicalId, Session, UserId};
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use std::path::PathBuf;
use std::time::{Duration, Instant};

fn survey() -> Survey {
    discovery::survey(&survey_options())
}

/// A survey on a host with these files.
fn survey_with(root: &Directory) -> Survey {
    discovery::survey(&survey_options().root(root.path()))
}

fn codes(survey: &Survey) -> Vec<&'static str> {
    survey.findings.iter().map(Finding::code).collect()
}

/// Logical and physical ids of the devices.
fn ids(survey: &Survey) -> Vec<(u32, u32)> {
    survey.devices.iter().map(|npu| (npu.logical.0, npu.physical.0)).collect()
}

/// The root directory of a host that has these files only.
fn root(files: &[(&str, &str)]) -> Directory {
    let root = Directory::new();
    for (path, text) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    root
}

/// The root directory of a host whose sysfs shows these NPUs.
fn with_functions(functions: &[&str]) -> Directory {
    let files: Vec<_> = functions
        .iter()
        .flat_map(|function| {
            let entry = format!("sys/bus/pci/devices/{function}");
            [(format!("{entry}/vendor"), "0x19e5\n"), (format!("{entry}/device"), "0xd802\n")]
        })
        .collect();
    let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    root(&files)
}

#[test]
fn only_the_nodes_that_exist_are_opened() {
    isolated(Config { devices: 3, ..Config::default() }, |emulator| {
        emulator.record();
        assert_eq!(ids(&survey()), [(0, 0), (1, 1), (2, 2)]);
        let opened: Vec<String> = emulator.records().into_iter().filter_map(|record| record.path).collect();
        let nodes = opened.iter().filter(|path| !path.ends_with("manager") && !path.ends_with("hdc"));
        assert_eq!(nodes.collect::<Vec<_>>(), ["/dev/davinci0", "/dev/davinci1", "/dev/davinci2"]);
    });
}

#[test]
fn a_healthy_host_shows_every_device_with_all_its_facts() {
    on_each_generation(Config::default(), |generation, _| {
        let survey = survey();
        assert_eq!(survey.findings, []);
        assert_eq!(survey.environment, Some(Environment::Host));
        assert_eq!(survey.generation, Some(generation));
        assert_eq!(survey.memory_driver, Some(MemoryDriver::V2));
        assert_eq!(survey.devices.len(), 2);
        for (number, npu) in (0..).zip(&survey.devices) {
            assert_eq!(npu.logical, LogicalId(number));
            assert_eq!(npu.physical, PhysicalId(number));
            assert_eq!(npu.user, Some(UserId(number)));
            assert_eq!(npu.state, DeviceState::Working);
            assert!(npu.is_usable());
            assert_eq!(npu.health, Some(Health::Normal));
            assert_eq!(npu.split, Some(Split::Whole));
            assert_eq!(npu.sharing_obstacle(), None);
            assert_eq!(npu.instance, None);
            let chip = npu.chip.as_deref().unwrap();
            assert_eq!(npu.soc.as_deref(), Some(format!("Ascend{chip}").as_str()));
            assert!(npu.ai_cores.is_some());
            let hbm = npu.hbm.unwrap();
            assert_eq!(hbm.total, 64 << 30);
            assert!(hbm.free <= hbm.total && hbm.free > 0);
            let pci = npu.pci.unwrap();
            assert_eq!(pci.domain, None, "only sysfs has it");
            let pod = npu.super_pod.unwrap();
            assert_eq!(pod.sdid & 0xffff, number);
            assert_eq!(pod.sdid >> 22, pod.server);
            assert_eq!(npu.identity.to_string(), format!("{pci}/{number}@{:08x}", pod.sdid));
        }
        let [first, second] = &survey.devices[..] else { panic!() };
        assert_ne!(first.identity, second.identity);
    });
}

#[test]
fn discovery_leaves_nothing_open_and_can_be_repeated() {
    isolated(Config::default(), |emulator| {
        let first = survey();
        assert_nothing_left(emulator);
        assert_eq!(survey(), first);
        assert_eq!(discovery::list_with(&survey_options()).unwrap(), first.devices);
    });
}

#[test]
fn threads_may_discover_at_the_same_time() {
    isolated(Config::default(), |_| {
        let expected = survey();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(survey)).collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), expected);
            }
        });
    });
}

#[test]
fn the_pci_domain_comes_from_sysfs() {
    isolated(Config::default(), |_| {
        let pci = survey().devices[0].pci.unwrap();
        let root = with_functions(&[&format!("0002:{pci}")]);
        let survey = survey_with(&root);
        assert_eq!(survey.devices[0].pci.unwrap().to_string(), format!("0002:{pci}"));
        assert_eq!(survey.devices[1].pci.unwrap().domain, None);
        assert_eq!(survey.devices[0].identity.to_string().split('/').next(), Some(pci.to_string().as_str()));
        assert_eq!(survey.on_pci.len(), 1);
    });
}

#[test]
fn user_ids_follow_the_list_of_visible_devices() {
    isolated(Config { devices: 4, ..Config::default() }, |_| {
        let survey = discovery::survey(&survey_options().visible("3,1".into()));
        assert_eq!(survey.user_device(UserId(0)).unwrap().logical, LogicalId(3));
        assert_eq!(survey.user_device(UserId(1)).unwrap().logical, LogicalId(1));
        assert_eq!(survey.user_device(UserId(2)), None);
        assert_eq!(survey.device(LogicalId(0)).unwrap().user, None);
    });
}

#[test]
fn a_missing_driver_is_distinguished_from_a_container_without_the_node() {
    isolated(Config { door: Door::Missing, ..Config::default() }, |_| {
        assert_eq!(codes(&survey()), ["node-missing"], "whether the driver is loaded cannot be known");
        let none = survey_with(&root(&[("proc/modules", "nvme 1 0 - Live 0x0\n")]));
        assert_eq!(none.findings, [Finding::DriverNotLoaded]);
        assert_eq!(none.environment, None);
        let here = survey_with(&root(&[("proc/modules", "asdrv_pbl 1 0 - Live 0x0\n")]));
        assert_eq!(here.findings, [Finding::NodeMissing("/dev/davinci_manager".into())]);

        let error = discovery::list_with(&survey_options()).unwrap_err().to_string();
        assert!(error.contains("/dev/davinci_manager") && error.contains("--device"), "{error}");
    });
}

#[test]
fn a_mode_that_forbids_the_manager_is_recognised() {
    isolated(Config { door: Door::Forbidden, ..Config::default() }, |_| {
        assert_eq!(codes(&survey()), ["no-permission"]);
    });
}

#[test]
fn a_cgroup_that_denies_the_manager_is_recognised() {
    isolated(Config { door: Door::Denied, ..Config::default() }, |_| {
        assert_eq!(codes(&survey()), ["denied-by-cgroup"]);
    });
}

#[test]
fn a_node_of_an_unloaded_driver_is_recognised() {
    isolated(Config { door: Door::Stale, ..Config::default() }, |_| {
        assert_eq!(codes(&survey()), ["stale-node"]);
    });
}

#[test]
fn a_missing_module_is_named() {
    isolated(Config { missing_modules: vec!["uda".into()], ..Config::default() }, |_| {
        assert_eq!(survey().findings, [Finding::ModuleMissing("uda")]);
    });
}

#[test]
fn devices_are_listed_even_when_the_modules_for_their_facts_are_missing() {
    let missing_modules = vec!["URD".into(), "DEVMNG".into()];
    isolated(Config { missing_modules, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.findings, [Finding::ModuleMissing("DEVMNG"), Finding::ModuleMissing("URD")]);
        assert_eq!(survey.devices.len(), 2);
        assert_eq!(survey.devices[0].state, DeviceState::Unknown);
        assert_eq!(survey.devices[0].soc, None);
    });
}

#[test]
fn a_host_without_devices_says_so() {
    isolated(Config { devices: 0, ..Config::default() }, |emulator| {
        emulator.record();
        assert_eq!(survey().findings, [Finding::NoDevice]);
        assert!(!commands(emulator).contains(&"SETUP_DEV_TABLE"), "no SETUP without nodes");
    });
}

#[test]
fn a_user_who_may_open_no_node_does_not_hide_the_devices_from_others() {
    let places = vec![Place::host_without(&[0, 1])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        emulator.record();
        let survey = survey();
        assert_eq!(survey.findings, [Finding::NodesForbidden { nodes: 2 }]);
        assert!(survey.devices.is_empty());
        let commands = commands(emulator);
        assert!(!commands.contains(&"SETUP_DEV_TABLE") && !commands.contains(&"GET_DEV_LIST"), "{commands:?}");
    });
}

#[test]
fn a_user_who_may_open_some_nodes_gets_those() {
    let places = vec![Place::host_without(&[0])];
    isolated(Config { devices: 3, places, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.findings, [Finding::SomeNodesForbidden { nodes: vec![0] }]);
        assert_eq!(ids(&survey), [(0, 1), (1, 2)]);
    });
}

#[test]
fn a_host_whose_devices_a_restricted_process_hides_is_recognised_and_recovers() {
    let places = vec![Place::host(), Place::host_without(&[0])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        // The first survey after the driver was loaded is that of a user who may open one node of
        // two.
        let restricted = start(|channel| {
            channel.wait();
            channel.send(survey().devices.len() as u64);
            channel.wait();
        });
        let pid = restricted.pid();
        emulator.control(move |driver| driver.machine.put(pid, 1));
        restricted.signal();
        assert_eq!(restricted.receive(), 1);

        let blind = survey();
        assert_eq!(blind.findings, [Finding::Hidden]);
        assert!(blind.devices.is_empty());

        restricted.signal();
        restricted.join();
        assert_eq!(survey().devices.len(), 2);
    });
}

#[test]
fn a_container_sees_its_own_devices_under_its_own_numbers() {
    let places = vec![Place::container(&[1, 3])];
    on_each_generation(Config { devices: 4, places, ..Config::default() }, |generation, emulator| {
        emulator.record();
        let survey = survey();
        assert_eq!(survey.environment, Some(Environment::Container));
        assert_eq!(survey.generation, Some(generation));
        assert_eq!(survey.findings, []);
        assert_eq!(ids(&survey), [(0, 1), (1, 3)]);

        // No command that needs the table comes before it.
        let commands = commands(emulator);
        let setup = commands.iter().position(|&name| name == "SETUP_DEV_TABLE").unwrap();
        let early = ["URD", "GET_DEV_LIST", "GET_DEVINFO", "GET_PCIINFO", "GET_HOST_PHY_MACH_FLAG"];
        assert!(commands[..setup].iter().all(|name| !early.contains(name)), "{commands:?}");
    });
}

#[test]
fn a_device_has_the_same_identity_inside_and_outside_a_container() {
    let places = vec![Place::host(), Place::container(&[1])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        let outside = survey().device(LogicalId(1)).unwrap().identity;
        let pid = own_pid();
        emulator.control(move |driver| driver.machine.put(pid, 1));
        let inside = survey();
        assert_eq!(inside.environment, Some(Environment::Container));
        assert_eq!(inside.devices.len(), 1);
        assert_eq!(inside.devices[0].logical, LogicalId(0));
        assert_eq!(inside.devices[0].identity, outside);
    });
}

#[test]
fn a_survey_in_a_container_without_devices_does_not_freeze_its_table() {
    let places = vec![Place::container(&[])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        emulator.record();
        let survey = survey();
        assert_eq!(survey.findings, [Finding::NoDevicePassed]);
        assert!(!commands(emulator).contains(&"SETUP_DEV_TABLE"));
    });
}

#[test]
fn a_device_of_another_container_is_reported_and_the_rest_is_usable() {
    let places = vec![Place::container(&[0, 1])];
    isolated(Config { occupied: vec![0], places, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.findings, [Finding::Occupied { nodes: vec![0], others: true }]);
        assert_eq!(survey.findings[0].severity(), Severity::Warning);
        assert_eq!(ids(&survey), [(0, 1)]);
    });
}

#[test]
fn a_container_whose_only_device_is_occupied_gets_the_reason() {
    let places = vec![Place::container(&[0])];
    isolated(Config { occupied: vec![0], places, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.findings, [Finding::Occupied { nodes: vec![0], others: false }]);
        assert_eq!(survey.findings[0].severity(), Severity::Fatal);
        assert!(survey.devices.is_empty());
        let error = discovery::list_with(&survey_options()).unwrap_err().to_string();
        assert!(error.contains("another container"), "{error}");
    });
}

#[test]
fn a_container_with_a_part_of_the_hosts_devices_gets_a_note() {
    let places = vec![Place::container(&[0])];
    isolated(Config { places, ..Config::default() }, |_| {
        let root = with_functions(&["0000:c1:00.0", "0000:c2:00.0"]);
        let survey = survey_with(&root);
        assert_eq!(survey.findings, [Finding::PartlyPassed { listed: 1, on_pci: 2 }]);
        assert_eq!(survey.findings[0].severity(), Severity::Note);
    });
}

#[test]
fn a_container_whose_table_was_made_too_early_is_reported_as_frozen() {
    let places = vec![Place::container(&[0, 1])];
    isolated(Config { places, ..Config::default() }, |_| {
        // A program that opens one of the two nodes and makes the table: the other device is lost
        // until the container ends.
        let manager = ModuleFile::open(davinci::module::UDA);
        drop(open("/dev/davinci1", OFlag::O_RDONLY, Mode::empty()).unwrap());
        assert_eq!(manager.ioctl(uda::SETUP_DEV_TABLE.request(), &mut uda::SetupTable { devices: 1 }), 0);
        drop(manager);

        let survey = survey();
        assert_eq!(survey.findings, [Finding::TableFrozen { opened: 2, listed: 1 }]);
        assert_eq!(survey.devices.len(), 1);
        assert_eq!(survey.devices[0].physical, PhysicalId(1));
    });
}

#[test]
fn cards_that_did_not_come_up_are_counted() {
    isolated(Config::default(), |_| {
        let root = with_functions(&["0000:c1:00.0", "0000:c2:00.0", "0000:c3:00.0"]);
        let survey = survey_with(&root);
        assert_eq!(survey.findings, [Finding::SomeDidNotComeUp { on_pci: 3, listed: 2 }]);
        assert_eq!(survey.devices.len(), 2);
    });
}

#[test]
fn a_host_whose_cards_all_failed_is_distinguished_from_one_without_cards() {
    isolated(Config { devices: 0, ..Config::default() }, |_| {
        let root = with_functions(&["0000:c1:00.0"]);
        let survey = survey_with(&root);
        assert_eq!(survey.findings, [Finding::NoneCameUp { on_pci: 1 }]);
    });
}

#[test]
fn a_fault_of_a_device_is_reported_with_its_severity() {
    isolated(Config::default(), |emulator| {
        emulator.control(|driver| {
            if let Some(device) = driver.machine.device_mut(1) {
                device.alarm = 2;
            }
        });
        let survey = survey();
        assert_eq!(survey.findings, [Finding::Unhealthy(LogicalId(1), Health::Major)]);
        assert_eq!(survey.devices[1].health, Some(Health::Major));
        assert_eq!(survey.devices[0].health, Some(Health::Normal));
    });
}

#[test]
fn a_dead_device_is_not_usable() {
    isolated(Config::default(), |emulator| {
        emulator.control(|driver| driver.machine.kill_device(0));
        let survey = survey();
        assert!(!survey.devices[0].is_usable(), "{:?}", survey.devices[0]);
        assert!(survey.devices[1].is_usable());
        assert!(survey.findings.iter().any(|finding| finding.device() == Some(LogicalId(0))));
    });
}

#[test]
fn a_container_whose_devices_an_early_query_dropped_gets_them_again() {
    // Another process of the container queried the list before it opened the nodes: the driver
    // drops what was opened, once.
    let places = vec![Place::container(&[0, 1])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        inject(emulator, "SETUP_DEV_TABLE#1=EBUSY");
        let survey = survey();
        assert_eq!(survey.findings, []);
        assert_eq!(survey.devices.len(), 2);
    });
}

#[test]
fn a_container_that_keeps_losing_its_devices_gets_the_reason() {
    let places = vec![Place::container(&[0, 1])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        inject(emulator, "SETUP_DEV_TABLE=EBUSY");
        assert_eq!(survey().findings, [Finding::TakenAway]);
    });
}

#[test]
fn too_many_containers_are_reported_with_the_limit() {
    let places = vec![Place::container(&[0])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        inject(emulator, "SETUP_DEV_TABLE=ENOMEM");
        let survey = survey();
        assert_eq!(codes(&survey), ["setup-refused"]);
        assert!(survey.findings[0].remedy().contains("128"));
    });
}

#[test]
fn a_removed_device_is_recognised_although_it_is_listed() {
    on_each_generation(Config { phases: vec![(1, Phase::Removed)], ..Config::default() }, |_, _| {
        let survey = survey();
        assert_eq!(survey.findings, [Finding::Removed(LogicalId(1))]);
        assert_eq!(survey.devices.len(), 2);
        assert!(survey.devices[0].is_usable());
        assert_eq!(survey.devices[1].state, DeviceState::Removed);
        assert!(!survey.devices[1].is_usable());
    });
}

#[test]
fn discovery_and_opening_leave_errors_in_the_kernels_log_only_on_8_5_0() {
    on_each_generation(Config::default(), |generation, emulator| {
        // The first number that is asked for is one that 8.5.0 does not have.
        let wrong_number = u32::from(generation == Generation::V8_5_0);
        let logged = || emulator.control(|driver| std::mem::take(&mut driver.machine.logged_refusals));
        let survey = survey();
        assert_eq!(codes(&survey), [""; 0]);
        assert!(survey.devices.iter().all(|npu| npu.hbm.is_some()), "{survey:?}");
        assert_eq!(logged(), wrong_number, "survey");
        assert!(discovery::can_access(LogicalId(0), LogicalId(1)).unwrap());
        assert_eq!(logged(), wrong_number, "peer access");
        let session = Session::open().unwrap();
        assert_eq!(logged(), wrong_number, "session");
        session.device(LogicalId(0)).unwrap();
        assert_eq!(logged(), 0, "device");
    });
}

/// What a survey says about a memory driver of one generation with the rest of another.
fn assert_mixture(generation: Generation, is_reported: bool) {
    let survey = survey();
    let text = format!("the memory driver is of generation {generation} and the rest of the driver of another");
    let reported = survey.findings.iter().any(|finding| finding.to_string().contains(&text));
    assert_eq!(reported, is_reported, "{:?}", survey.findings);
    assert_eq!(survey.generation, Some(generation));
    assert!(survey.devices.iter().all(|npu| npu.hbm.is_some()), "{survey:?}");
}

#[test]
fn a_newer_memory_driver_with_the_rest_of_8_5_0_is_reported() {
    let config = Config { other_modules: Some(Generation::V8_5_0), ..Config::default() };
    on_each_generation(config, |generation, emulator| {
        assert_mixture(generation, generation != Generation::V8_5_0);
        let logged = emulator.control(|driver| driver.machine.logged_refusals);
        assert_eq!(logged, u32::from(generation == Generation::V8_5_0));
    });
}

/// Only answers of firmware distinguish 9.0.0 from 26.1, and asking would leave error lines.
#[test]
fn a_memory_driver_of_8_5_0_with_the_rest_of_a_newer_one_is_reported() {
    let config = Config { other_modules: Some(Generation::V26_1), ..Config::default() };
    on_each_generation(config, |generation, emulator| {
        assert_mixture(generation, generation == Generation::V8_5_0);
        let logged = emulator.control(|driver| driver.machine.logged_refusals);
        assert_eq!(logged, u32::from(generation == Generation::V8_5_0));
    });
}

#[test]
fn a_device_in_reset_is_distinguished_from_a_removed_one() {
    isolated(Config { phases: vec![(0, Phase::Resetting)], ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.devices[0].state, DeviceState::Resetting);
        assert_eq!(survey.findings, [Finding::Resetting(LogicalId(0))]);
    });
}

#[test]
fn a_device_that_is_not_ready_is_starting() {
    isolated(Config { phases: vec![(0, Phase::Registered)], ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.devices[0].state, DeviceState::Starting);
        assert_eq!(survey.findings[0], Finding::Starting(LogicalId(0)));
    });
}

#[test]
fn a_survey_waits_no_longer_than_its_timeout() {
    // A device that never starts, on a driver that waits for it longer than any test may take.
    isolated_leaky(waits_for_a_device(Duration::from_secs(1000)), |_| {
        let survey = discovery::survey(&survey_options().timeout(Duration::from_millis(200)));
        assert_eq!(codes(&survey), ["still-starting"]);
    });
}

#[test]
fn a_survey_waits_for_the_setup_that_an_earlier_one_abandoned() {
    let patience = Duration::from_secs(2);
    isolated(waits_for_a_device(patience), |_| {
        let begun = Instant::now();
        discovery::survey(&survey_options().timeout(Duration::ZERO));
        assert_eq!(survey().devices.len(), 1);
        assert!(begun.elapsed() >= patience, "{:?}", begun.elapsed());
    });
}

#[test]
fn where_no_thread_can_be_started_a_survey_says_so() {
    let no_thread = |work: &(dyn Fn() + Sync)| without(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN, work);
    isolated(Config::default(), |_| {
        no_thread(&|| {
            let survey = survey();
            assert_eq!(survey.findings, [Finding::NoThread { listed: 0 }]);
            assert_eq!(survey.findings[0].severity(), Severity::Fatal);
            assert_eq!(survey.devices.len(), 0);
        });
        assert_eq!(survey().findings, []);
    });
    // The SETUP of an earlier survey has its thread; the questions get none.
    isolated(waits_for_a_device(Duration::from_secs(2)), |_| {
        discovery::survey(&survey_options().timeout(Duration::ZERO));
        no_thread(&|| {
            let survey = survey();
            assert_eq!(survey.findings, [Finding::NoThread { listed: 1 }]);
            assert_eq!(survey.findings[0].severity(), Severity::Warning);
            assert_eq!(ids(&survey), [(0, 0)]);
        });
        assert_eq!(ids(&survey()), [(0, 0)]);
    });
}

/// A host on which the first SETUP waits this long for a device that never starts.
fn waits_for_a_device(setup_patience: Duration) -> Config {
    Config { phases: vec![(1, Phase::Detected)], boot: None, setup_patience, ..Config::default() }
}

#[test]
fn a_device_that_starts_in_time_is_waited_for() {
    let config =
        Config { phases: vec![(1, Phase::Detected)], boot: Some(Duration::from_millis(300)), ..Config::default() };
    isolated(config, |_| {
        assert_eq!(survey().devices.len(), 2);
    });
}

#[test]
fn a_virtual_instance_cannot_share_its_memory() {
    let config = Config {
        virtual_instances: vec![103],
        split_mode: 2,
        places: vec![Place::container(&[103])],
        ..Config::default()
    };
    isolated(config, |_| {
        let survey = survey();
        let npu = &survey.devices[0];
        assert_eq!((npu.logical, npu.physical), (LogicalId(0), PhysicalId(103)));
        assert_eq!(npu.instance.unwrap().card, PhysicalId(0));
        assert!(npu.sharing_obstacle().is_some());
        assert!(codes(&survey).contains(&"virtual-instance"));
    });
}

#[test]
fn a_split_device_cannot_share_its_memory() {
    isolated(Config { split_mode: 2, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.devices[0].split, Some(Split::Containers));
        assert!(survey.devices[0].sharing_obstacle().is_some());
        assert_eq!(codes(&survey), ["split-device", "split-device"]);
    });
}

#[test]
fn the_memory_driver_of_the_next_hardware_is_recognised() {
    isolated(Config { svm_v3: true, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.memory_driver, Some(MemoryDriver::V3));
        assert_eq!(survey.findings, [Finding::MemoryDriverV3]);
    });
}

#[test]
fn a_memory_driver_of_an_unknown_generation_is_reported_with_what_was_seen() {
    isolated(Config { unknown_generation: true, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(codes(&survey), ["unknown-generation"]);
        assert!(survey.findings[0].to_string().contains("GET_MMAP_INFO"), "{}", survey.findings[0]);
        assert_eq!(survey.memory_driver, Some(MemoryDriver::V2));
        assert_eq!(survey.generation, None);
        assert_eq!(survey.devices.len(), 2, "the devices are listed anyway");
    });
}

#[test]
fn a_missing_memory_driver_is_recognised() {
    isolated(Config { missing_modules: vec!["SVM".into()], ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(survey.memory_driver, Some(MemoryDriver::Missing));
        assert_eq!(survey.findings, [Finding::MemoryDriverMissing]);
        assert_eq!(survey.devices.len(), 2);
    });
}

#[test]
fn a_container_without_the_daemons_node_is_warned() {
    isolated(Config { hdc_door: Door::Missing, ..Config::default() }, |_| {
        let survey = survey();
        assert_eq!(codes(&survey), ["no-daemon-node"]);
        assert_eq!(survey.devices.len(), 2);
    });
}

#[test]
fn peers_on_one_host_can_reach_each_other() {
    on_each_generation(Config::default(), |_, _| {
        survey();
        assert!(discovery::can_access(LogicalId(0), LogicalId(1)).unwrap());
        let error = discovery::can_access(LogicalId(0), LogicalId(7)).unwrap_err();
        assert!(error.to_string().contains("device 7"), "{error}");
    });
}

#[test]
fn every_finding_has_a_message_and_a_remedy() {
    let path = PathBuf::from("/dev/davinci_manager");
    let device = LogicalId(0);
    let findings = [
        Finding::DriverNotLoaded,
        Finding::NodeMissing(path.clone()),
        Finding::StaleNode(path.clone()),
        Finding::Forbidden(path.clone()),
        Finding::Denied(path),
        Finding::ModuleMissing("URD"),
        Finding::NoDevice,
        Finding::NoneCameUp { on_pci: 2 },
        Finding::SomeDidNotComeUp { on_pci: 2, listed: 1 },
        Finding::NodesForbidden { nodes: 2 },
        Finding::SomeNodesForbidden { nodes: vec![1, 2] },
        Finding::NoDevicePassed,
        Finding::Occupied { nodes: vec![1, 2], others: true },
        Finding::VisibleDevicesEmpty,
        Finding::VisibleDevicesUnreadable { value: "0,x".into(), entry: "x".into(), kept: 1 },
        Finding::VisibleDevicesAbsent { value: "4".into(), absent: vec![4], listed: 2 },
        Finding::TableFrozen { opened: 2, listed: 1 },
        Finding::TakenAway,
        Finding::StillStarting { waited: Duration::from_secs(3) },
        Finding::Unanswered { waited: Duration::from_secs(3) },
        Finding::NoThread { listed: 0 },
        Finding::Hidden,
        Finding::Removed(device),
        Finding::Lost(device),
        Finding::Unhealthy(device, Health::Major),
        Finding::VirtualInstance(device),
        Finding::Split(device),
        Finding::VirtualMachine(device),
        Finding::MemoryDriverV3,
        Finding::UnknownGeneration("x".into()),
        Finding::SmallAddressSpace { bits: 39 },
    ];
    let mut codes: Vec<_> = findings.iter().map(Finding::code).collect();
    for finding in &findings {
        let message = finding.to_string();
        assert!(message.len() > 20 && !message.ends_with('.'), "{message}");
        assert!(finding.remedy().ends_with('.'), "{}", finding.remedy());
    }
    codes.sort_unstable();
    codes.dedup();
    assert_eq!(codes.len(), findings.len());
}

#[test]
fn device_nodes_are_opened_for_writing_on_the_host_and_for_reading_in_a_container() {
    let places = vec![Place::host(), Place::container(&[0])];
    isolated(Config { places, ..Config::default() }, |emulator| {
        emulator.record();
        let modes = || {
            let records = emulator.records().into_iter();
            let node = |record: &Record| record.call == "open" && record.path.as_deref() == Some("/dev/davinci0");
            let flags = records.filter(node).filter_map(|record| record.flags);
            let flags = flags.map(|flags| i32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap());
            flags.map(|flags| flags & OFlag::O_ACCMODE.bits()).collect::<Vec<_>>()
        };
        survey();
        assert_eq!(modes(), [OFlag::O_WRONLY.bits()]);
        let pid = own_pid();
        emulator.control(move |driver| driver.machine.put(pid, 1));
        survey();
        assert_eq!(modes(), [OFlag::O_WRONLY.bits(), OFlag::O_RDONLY.bits()]);
    });
}

#[test]
fn a_memory_module_that_refuses_its_file_is_reported() {
    isolated(Config::default(), |emulator| {
        emulator.record();
        survey();
        // The name of the module is what OPEN takes.
        let opens: Vec<_> = emulator.records().into_iter().filter(|record| record.cmd == Some("OPEN")).collect();
        let named = |record: &Record| record.in_hex.as_deref() == Some("53564d");
        let nth = opens.iter().position(named).unwrap() + 1;
        inject(emulator, &format!("OPEN#{nth}=EPERM"));
        let survey = survey();
        assert_eq!(survey.findings, [Finding::ModuleRefused(davinci::module::SVM, Errno::EPERM)]);
    });
}
