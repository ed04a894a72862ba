//! What the death of an NPU costs, and who says so.

mod support;

use ascend_emulator::fault::{DeviceFault, Fault};
use ascend_emulator::{Config, isolated_leaky};
use ascend_vmm::{LogicalId, Session};
use ascend_vmm_service::Mode;
use std::time::{Duration, Instant};
use support::{KEYS, MIB, Service, check_weights, name, options, write_weights};

#[test]
fn an_npu_that_dies_is_named_and_those_beside_it_go_on() {
    isolated_leaky(Config::default(), |emulator| {
        let service = Service::start("");
        let client = service.client();
        let session = Session::open().unwrap();
        let [dying, other] = [0, 1].map(|id| session.device(LogicalId(id)).unwrap());
        let mut lost = write_weights(&client, &dying, &name("w"), KEYS);
        let kept = write_weights(&client, &other, &name("v"), KEYS);
        emulator.control(|driver| driver.inject(&Fault::Device { device: 0, fault: DeviceFault::Dead }));
        // Whoever uses the memory hears it of the driver.
        let read = lost.get("norm").unwrap().part(0, 16).unwrap().read(&mut [0; 16]).unwrap_err().to_string();
        assert!(read.contains("device 0"), "{read}");
        let slept = lost.sleep().unwrap_err().to_string();
        assert!(slept.contains("device 0"), "{slept}");
        let joined = client.read(&dying, &name("w"), &options()).unwrap_err().to_string();
        assert!(joined.contains("there is no such device, or its link is down"), "{joined}");
        let mut writer = client.write(&dying, &name("x"), Mode::Write, 2 * MIB, &options()).unwrap();
        let refused = writer.allocate(2 * MIB, "").unwrap_err().to_string();
        assert!(refused.contains("device 0"), "{refused}");
        // The service says it by itself.
        let deadline = Instant::now() + Duration::from_secs(120);
        let devices = loop {
            let devices = service.status().devices;
            if !devices[0].problem.is_empty() {
                break devices;
            }
            assert!(Instant::now() < deadline, "{devices:?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(devices[0].problem.contains("device 0") && devices[1].problem.is_empty(), "{devices:?}");
        let events = client.events(0).unwrap();
        assert_eq!(events.iter().filter(|it| it.text.starts_with("NPU 0 does not answer: ")).count(), 1, "{events:?}");
        // The other NPU is served as before.
        check_weights(&kept, KEYS);
        drop(kept);
        check_weights(&client.read(&other, &name("v"), &options()).unwrap(), KEYS);
        drop(write_weights(&client, &other, &name("y"), KEYS));
        // An NPU that is gone keeps no process from ending.
        drop((lost, writer, dying, other, session));
        drop(service);
    });
}
