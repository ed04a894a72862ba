//! The service under seeded schedules: keeper, front and engines as processes of one program.

mod support;

use ascend_emulator::{Client as Engine, Config, fork};
use ascend_vmm_service::{Client, Error, Mode, Reader};
use support::scenarios::{holds, scenario};
use support::{MIB, Service, device, name, options};

/// A tensor that its value describes: the byte with which it is filled.
const TENSOR: u64 = 8192;

fn check(reader: &Reader) -> Result<(), Error> {
    let mut bytes = vec![0; TENSOR as usize];
    for (key, entry) in reader.entries() {
        reader.get(key)?.read(&mut bytes)?;
        if bytes.iter().any(|byte| *byte != entry.value[0]) {
            let (version, found) = (reader.version(), bytes[0]);
            holds(Err(format!("{key} of version {version} begins with {found}, not all of it is {}", entry.value[0])))
        }
    }
    if reader.entries().len() != 2 {
        holds(Err(format!("version {} has {} keys", reader.version(), reader.entries().len())))
    }
    Ok(())
}

fn write(client: &Client, mode: Mode, byte: u8) -> Result<Reader, Error> {
    let device = device();
    let mut writer = client.write(&device, &name("weights"), mode, 2 * MIB, &options())?;
    for key in ["one", "other"] {
        writer.put(key, TENSOR, &[byte])?.fill(byte)?;
    }
    writer.commit()
}

/// One engine writes two versions; others read, sleep and wake. What is read is one version, whole.
#[test]
fn memory_service() {
    scenario("memory_service", &Config::default(), 8, || {
        let service = Service::start("");
        let client = service.client();
        let readers: Vec<Engine> = (0..2)
            .map(|_| {
                fork(|| {
                    let device = device();
                    let mut reader = client.read(&device, &name("weights"), &options()).unwrap();
                    check(&reader).unwrap();
                    reader.sleep().unwrap();
                    reader.wake().unwrap();
                    check(&reader).unwrap();
                })
            })
            .collect();
        let first = write(&client, Mode::Write, 1).unwrap();
        check(&first).unwrap();
        drop(first);
        check(&write(&client, Mode::Write, 2).unwrap()).unwrap();
        readers.into_iter().for_each(Engine::join);
    });
}
