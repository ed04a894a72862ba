//! What the memory service costs: a restart, a commit, a request, and its own memory.
//!
//! The service is this program again (`serve`), and the engine is this process. Calls of the driver
//! and bytes are exact; times are ratios of one run.

use super::figure::{Figure, Quantity, Target};
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator};
use ascend_vmm::{Device, LogicalId, Session};
use ascend_vmm_service::protocol::{self, Answer, Request, Status, VERSION};
use ascend_vmm_service::{Client, DomainName, Entry, Mode, OpenOptions};
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Weights of an engine.
const WEIGHTS: u64 = 64 * GIB;
/// Calls of a restart besides two for each handle.
const OTHER_CALLS: u64 = 12;
/// Bytes that a key says about its tensor.
const VALUE: usize = 100;

/// All figures. `many` is how many keys, allocations and domains there are.
pub fn figures(many: u64) -> Vec<Figure> {
    let mut figures = Vec::new();
    if let Err(error) = measure(many, &mut figures) {
        let reason = Err(error.to_string());
        figures.push(Figure::new("memory service", None, Quantity::Calls, reason, Target::must(0.0)));
    }
    figures
}

fn measure(many: u64, figures: &mut Vec<Figure>) -> Outcome<()> {
    let config = Config { hbm: 1 << 42, device_process: DeviceProcess::Automatic, ..Config::default() };
    let emulator = Emulator::start(config)?;
    emulator.run(|| {
        let service = Service::start()?;
        let client = Client::new(service.socket());
        let device = Session::open()?.device(LogicalId(0))?;
        let mut add = |name: &str, live: u64, unit: Quantity, measured: f64, must: f64| {
            figures.push(Figure::new(name, Some(live), unit, Ok(measured), Target::must(must)));
        };
        for tensors in [1, 100, many] {
            let (calls, keepers, handles) = restart(&emulator, &service, &client, &device, tensors)?;
            let most = (2 * handles + OTHER_CALLS) as f64;
            add("restart with 64 GiB, by tensors", tensors, Quantity::Calls, calls as f64, most);
            add("… in the keeper", tensors, Quantity::Calls, keepers as f64, handles as f64);
        }
        let ratio = commit(&service, &client, &device, many)?;
        add("commit of keys, to their bytes through a socket pair", many, Quantity::Times, ratio, 5.0);
        let bytes = memory(&service, &client, &device, many)?;
        add("service's own memory, by allocations", many, Quantity::Bytes, bytes as f64, (8 * MIB + 200 * many) as f64);
        let ratio = requests(&service, &client, &device, many)?;
        add("request with many domains, to one with few", many, Quantity::Times, ratio, 2.0);
        Ok(())
    })
}

/// A service, which ends with this.
struct Service {
    keeper: Child,
    directory: PathBuf,
}

impl Service {
    fn start() -> Outcome<Service> {
        let directory = std::env::temp_dir().join(format!("ascend-vmm-bench-{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve").arg("--socket").arg(directory.join("socket")).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null());
        let service = Service { keeper: command.spawn()?, directory };
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = service.status() {
            if Instant::now() > deadline {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(service)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    fn status(&self) -> Outcome<Status> {
        Ok(Client::new(self.socket()).status()?)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn domain(name: &str) -> Outcome<DomainName> {
    Ok(name.parse()?)
}

/// Calls of the engine and of the keeper from the service's answer to the last map, and handles.
fn restart(
    emulator: &Emulator,
    service: &Service,
    client: &Client,
    device: &Device,
    tensors: u64,
) -> Outcome<(u64, u64, u64)> {
    let name = domain(&format!("restart/{tensors}"))?;
    let options = OpenOptions::new();
    let mut writer = client.write(device, &name, Mode::Write, WEIGHTS + GIB, &options)?;
    for number in 0..tensors {
        writer.put(&format!("layers.{number}"), WEIGHTS / tensors / 512 * 512, &[0; VALUE])?;
    }
    let handles = writer.commit()?.allocations().count() as u64;
    emulator.record();
    let before = emulator.records().len();
    let reader = client.read(device, &name, &options)?;
    let records = emulator.records();
    drop(reader);
    let keeper = service.keeper.id() as i32;
    let listing = |record: &&ascend_emulator::record::Record| record.pid == keeper && record.cmd == Some("MEM_SET_PID");
    // The keeper is called when the engine has its role.
    let answered = before + records[before..].iter().take_while(|record| !listing(record)).count();
    let own = std::process::id() as i32;
    let calls = records[answered..].iter().filter(|record| record.pid == own).count() as u64;
    let keepers = records[answered..].iter().filter(listing).count() as u64;
    Ok((calls, keepers, handles))
}

/// What client and front compute for a commit, as a multiple of what its bytes take through a
/// socket pair.
fn commit(service: &Service, client: &Client, device: &Device, keys: u64) -> Outcome<f64> {
    let (name, front) = (domain("commit")?, service.status()?.front);
    let (mut commits, mut pairs) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let mut writer = client.write(device, &name, Mode::Write, GIB, &OpenOptions::new())?;
        let mut entries = Vec::new();
        for number in 0..keys {
            let (key, value) = (format!("model.layers.{number}.mlp.weight"), vec![7; VALUE]);
            writer.put(&key, 512, &value)?;
            entries.push((key, Entry { allocation: 1, offset: 512 * number, size: 512, value }));
        }
        let bytes: usize = entries.chunks(4096).map(|part| frame_length(part.to_vec())).sum();
        let before = computed()? + computed_by(front)?;
        let reader = writer.commit()?;
        commits.push(computed()? + computed_by(front)? - before);
        drop(reader);
        pairs.push(through_a_socket_pair(bytes)?);
    }
    // The best of each: what else runs takes its part of the caches.
    let best = |times: Vec<Duration>| times.into_iter().min().unwrap_or_default().as_secs_f64();
    Ok(best(commits) / best(pairs))
}

/// The time that this thread has computed: that does not depend on what else the machine does.
fn computed() -> Outcome<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// The same of a process that waits for something soon.
fn computed_by(process: i32) -> Outcome<Duration> {
    let clock = clock_getcpuclockid(Pid::from_raw(process))?;
    let stat = format!("/proc/{process}/stat");
    loop {
        let before = clock_gettime(clock)?;
        std::thread::sleep(Duration::from_millis(1));
        if std::fs::read_to_string(&stat)?.contains(") S ") && clock_gettime(clock)? == before {
            return Ok(before.into());
        }
    }
}

fn frame_length(entries: Vec<(String, Entry)>) -> usize {
    protocol::encode(&Request::Put { entries: entries.into_iter().collect() }).map_or(0, |frame| frame.len())
}

/// The time that two threads compute for bytes that one sends to the other, and a byte that comes
/// back.
fn through_a_socket_pair(bytes: usize) -> Outcome<Duration> {
    let (mut one, mut other) = UnixStream::pair()?;
    let sent = vec![7; bytes];
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || -> Outcome<Duration> {
            let start = computed()?;
            // As in the service, what comes is kept in memory that was not used before.
            let mut received = vec![0; bytes];
            other.read_exact(&mut received)?;
            std::hint::black_box(&received);
            other.write_all(&[1])?;
            Ok(computed()? - start)
        });
        let start = computed()?;
        one.write_all(&sent)?;
        one.read_exact(&mut [0])?;
        let own = computed()? - start;
        Ok(own + reader.join().map_err(|_| "the other thread panicked")??)
    })
}

/// Bytes of both processes and of the journal, while there are so many allocations.
fn memory(service: &Service, client: &Client, device: &Device, allocations: u64) -> Outcome<u64> {
    let name = domain("memory")?;
    let mut writer = client.write(device, &name, Mode::Write, 2 * MIB * allocations, &OpenOptions::new())?;
    for _ in 0..allocations {
        writer.allocate(2 * MIB, "")?;
    }
    let reader = writer.commit()?;
    let status = service.status()?;
    let bytes = own_memory(status.keeper)? + own_memory(status.front)? + memory_files(status.front)?;
    drop(reader);
    client.remove(&name)?;
    Ok(bytes)
}

fn own_memory(process: i32) -> Outcome<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
    Ok(line.split_whitespace().next().unwrap_or("0").parse::<u64>()? << 10)
}

fn memory_files(process: i32) -> Outcome<u64> {
    let mut bytes = 0;
    for file in std::fs::read_dir(format!("/proc/{process}/fd"))?.flatten() {
        if std::fs::read_link(file.path()).is_ok_and(|target| target.to_string_lossy().contains("memfd")) {
            bytes += std::fs::metadata(file.path())?.len();
        }
    }
    Ok(bytes)
}

/// The time of opening and closing a domain beside many, as a multiple of the time beside few.
fn requests(service: &Service, client: &Client, device: &Device, domains: u64) -> Outcome<f64> {
    let options = OpenOptions::new();
    let committed = |name: &str| -> Outcome<DomainName> {
        let name = domain(name)?;
        let mut writer = client.write(device, &name, Mode::Write, 2 * MIB, &options)?;
        writer.allocate(2 * MIB, "")?;
        drop(writer.commit()?);
        Ok(name)
    };
    let name = committed("request")?;
    let physical = service.status()?.devices[0].physical;
    let few = open_and_close(&service.socket(), &name, physical)?;
    for number in 0..domains {
        committed(&format!("many/{number}"))?;
    }
    let many = open_and_close(&service.socket(), &name, physical)?;
    Ok(many.as_secs_f64() / few.as_secs_f64())
}

/// The median time of an open and a close.
fn open_and_close(socket: &Path, name: &DomainName, device: u32) -> Outcome<Duration> {
    let mut socket = UnixStream::connect(socket)?;
    let process = std::process::id() as i32;
    ask(&mut socket, &Request::Hello { version: VERSION, process, program: "bench".into() })?;
    let open = Request::Open {
        domain: name.clone(),
        mode: Mode::Read,
        device,
        identity: String::new(),
        wait_ms: 0,
        allow_update: false,
        lends: false,
        token: Vec::new(),
    };
    let mut times = Vec::new();
    for _ in 0..1001 {
        let start = Instant::now();
        ask(&mut socket, &open)?;
        ask(&mut socket, &Request::Close {})?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn ask(socket: &mut UnixStream, request: &Request) -> Outcome<Answer> {
    socket.write_all(&protocol::encode(request)?)?;
    let mut arrived = Vec::new();
    let mut part = [0; 4096];
    loop {
        match protocol::decode::<Answer>(&arrived)? {
            Some((_, Answer::Error(error))) => return Err(error.into()),
            Some((_, answer)) => return Ok(answer),
            None => {
                let count = socket.read(&mut part)?;
                if count == 0 {
                    return Err("the service ended the connection".into());
                }
                arrived.extend_from_slice(&part[..count]);
            }
        }
    }
}
