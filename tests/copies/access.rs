//! Access to mapped memory: by the CPU, by other devices, and of devices to host memory.

use crate::support::{MIB2, contents, device, mapped_on, mapped_on_host, plain};
use ascend_emulator::config::Attachment;
use ascend_emulator::{Config, isolated, on_each_generation};
use ascend_vmm::Error;
use ascend_vmm::error::Errno;

#[test]
fn the_cpu_reads_and_writes_host_memory_and_device_memory() {
    on_each_generation(Config::default(), |_, emulator| {
        let device = device(0);
        let on_device = mapped_on(&device, MIB2);
        let on_host = mapped_on_host(MIB2);
        assert!(!on_device.is_visible_to_host() && on_host.is_visible_to_host());
        for mapping in [&on_device, &on_host] {
            mapping.write(100, b"from the copy").unwrap();
            let view = mapping.host_view().unwrap();
            assert_eq!(view.size() as u64, MIB2);
            let mut seen = [0; 13];
            view.read(100, &mut seen).unwrap();
            assert_eq!(&seen, b"from the copy");
            view.write(200, b"from the cpu").unwrap();
            assert_eq!(contents(mapping, 200, 12), b"from the cpu");
            view.fill(300, 10, 6).unwrap();
            assert_eq!(contents(mapping, 299, 12), [0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 0]);
            view.store_u32(400, 0x0102_0304).unwrap();
            assert_eq!(contents(mapping, 400, 4), 0x0102_0304u32.to_ne_bytes());
            assert_eq!(view.load_u32(400).unwrap(), 0x0102_0304);
            view.store_u64(408, 5).unwrap();
            assert_eq!(contents(mapping, 408, 8), 5u64.to_ne_bytes());
            assert_eq!(view.load_u64(408).unwrap(), 5);
            view.store_u8(500, 3).unwrap();
            assert_eq!(view.load_u8(500).unwrap(), 3);
            assert_eq!(view.as_ptr() as u64, mapping.address());
            for error in [
                view.read(view.size(), &mut [0]).unwrap_err(),
                view.write(usize::MAX, &[0]).unwrap_err(),
                view.fill(1, view.size(), 0).unwrap_err(),
                view.load_u32(2).unwrap_err(),
                view.store_u32(view.size() - 2, 0).unwrap_err(),
                view.load_u64(4).unwrap_err(),
                view.store_u64(view.size(), 0).unwrap_err(),
                view.load_u8(view.size()).unwrap_err(),
                view.store_u8(usize::MAX, 0).unwrap_err(),
            ] {
                assert!(matches!(error, Error::Invalid(_)), "{error}");
            }
        }
        assert!(on_device.is_visible_to_host() && on_host.is_visible_to_host());
        // Access that was granted once is not requested again.
        emulator.record();
        on_device.host_view().unwrap();
        on_host.host_view().unwrap();
        assert_eq!(emulator.records().len(), 0);
    });
}

#[test]
fn peers_get_access_and_keep_it_until_the_mapping_is_removed() {
    on_each_generation(Config::default(), |_, emulator| {
        let (device0, device1) = (device(0), device(1));
        let mapping = mapped_on(&device0, MIB2);
        assert!(mapping.is_granted(&device0).unwrap());
        assert!(!mapping.is_granted(&device1).unwrap());
        mapping.grant(&device0).unwrap();
        mapping.grant(&device1).unwrap();
        assert!(mapping.is_granted(&device1).unwrap());
        emulator.record();
        mapping.grant(&device1).unwrap();
        assert_eq!(emulator.records().len(), 0);
        drop(mapping);
        let host = mapped_on_host(MIB2);
        let error = host.grant(&device1).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EOPNOTSUPP), "{error}");
        assert!(error.to_string().contains("HCCS"), "{error}");
    });
}

#[test]
fn devices_on_hccs_reach_host_memory() {
    isolated(Config { attachment: Attachment::Hccs, ..Config::default() }, |_| {
        let device = device(0);
        let host = mapped_on_host(MIB2);
        host.grant(&device).unwrap();
        assert!(host.is_granted(&device).unwrap());
    });
}

#[test]
fn no_command_ever_carries_access_type_zero() {
    isolated(Config::default(), |emulator| {
        let (device0, device1) = (device(0), device(1));
        emulator.record();
        let mapping = mapped_on(&device0, MIB2);
        mapping.grant(&device1).unwrap();
        mapping.host_view().unwrap();
        let types: Vec<_> = emulator
            .records()
            .into_iter()
            .filter(|record| record.cmd == Some("MEM_SET_ACCESS"))
            .filter_map(|record| record.in_hex)
            // The type is the byte at offset 36 of the argument.
            .map(|hex| hex.get(72..74).unwrap_or("00").to_owned())
            .collect();
        assert_eq!(types, ["03", "03"]);
    });
}

#[test]
fn a_peer_stays_open_as_long_as_it_has_access_to_a_mapping() {
    on_each_generation(plain(), |_, emulator| {
        let (device, peer) = (device(0), device(1));
        let mapping = mapped_on(&device, MIB2);
        mapping.grant(&peer).unwrap();
        let peer = peer.close().unwrap_err().object;
        drop(peer);
        assert_eq!(emulator.state().memory.sessions[0].devices.len(), 2);
        mapping.unmap().unwrap();
        assert_eq!(emulator.state().memory.sessions[0].devices.len(), 1);
        assert!(emulator.state().peer_requests.is_empty());
    });
}
