//! The places of a broker: which clients are served, which wait, and which are cut off.
//!
//! One user never has all places, and one process has a quarter of them at most, so neither can
//! keep all others out. A client for which there is no place waits. A free place goes to the
//! waiting client whose user, then whose process, has the fewest places.
//!
//! A client that has a place but sends no request keeps it for [`Places::grace`] while another
//! waits for it; the oldest such client is cut off first. If too many wait, one is refused: the
//! oldest client of the process that has the most waiting, of the user that has the most.
//!
//! A client counts for the user and process that connected its socket. These are known before it
//! has sent anything, and decide about nothing but places.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who connected a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Connector {
    /// As this process's user namespace numbers it.
    pub(super) user: u32,
    /// `None` if this process's pid namespace does not see it: then only its user's limit holds.
    pub(super) process: Option<i32>,
}

/// A client that has a place.
pub(super) struct Visitor {
    /// Its number in [`Places`].
    pub(super) number: u64,
    pub(super) socket: Arc<UnixStream>,
}

#[derive(Debug)]
pub(super) struct Places {
    limits: Limits,
    grace: Duration,
    /// In the order of their arrival.
    clients: Vec<Client>,
    next: u64,
    stopped: bool,
}

/// How many places there are, and how many of them one user and one process can have.
#[derive(Debug, Clone, Copy)]
struct Limits {
    all: usize,
    user: usize,
    process: usize,
}

#[derive(Debug)]
struct Client {
    number: u64,
    connector: Connector,
    socket: Arc<UnixStream>,
    state: ClientState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientState {
    Waiting,
    /// It has a place since then, and has sent no request yet.
    Silent(Instant),
    Asked,
    /// It was silent for too long. Its thread is about to leave the place.
    CutOff,
}

/// Most clients that wait.
const MAX_WAITING: usize = 256;

impl Places {
    pub(super) fn new(all: usize, grace: Duration) -> Places {
        // Not all of them for one user, where there are two or more.
        let limits = Limits { all, user: (all - (all / 4).max(1)).max(1), process: all.div_ceil(4) };
        Places { limits, grace, clients: Vec::new(), next: 0, stopped: false }
    }

    /// How long a silent client keeps a place that another waits for.
    pub(super) fn grace(&self) -> Duration {
        self.grace
    }

    /// Lets a client wait. Returns the one to refuse if too many wait now.
    pub(super) fn queue(&mut self, connector: Connector, socket: UnixStream) -> Option<Arc<UnixStream>> {
        if self.stopped {
            return None;
        }
        let (number, socket) = (self.next, Arc::new(socket));
        self.next += 1;
        self.clients.push(Client { number, connector, socket, state: ClientState::Waiting });
        let waiting = ClientCounts::of(self.clients.iter().filter(|client| client.state == ClientState::Waiting));
        if waiting.all <= MAX_WAITING {
            return None;
        }
        let share = |client: &Client| (client.state == ClientState::Waiting).then(|| waiting.share(client.connector));
        let largest = self.clients.iter().filter_map(share).max();
        let oldest = self.clients.iter().position(|client| share(client) == largest)?;
        Some(self.clients.remove(oldest).socket)
    }

    /// Gives a place to the next waiting client that may have one.
    pub(super) fn admit(&mut self) -> Option<Visitor> {
        let limits = self.limits;
        let placed = ClientCounts::of(self.clients.iter().filter(|client| client.state != ClientState::Waiting));
        let waiting = self.clients.iter_mut().filter(|client| client.state == ClientState::Waiting);
        let fitting = waiting.filter(|client| placed.leave_room(client.connector, limits, None));
        // The oldest of equals.
        let client = fitting.min_by_key(|client| placed.share(client.connector))?;
        client.state = ClientState::Silent(Instant::now());
        Some(Visitor { number: client.number, socket: client.socket.clone() })
    }

    /// True if a client waits.
    pub(super) fn has_waiting(&self) -> bool {
        self.clients.iter().any(|client| client.state == ClientState::Waiting)
    }

    /// Cuts off the oldest silent client that keeps a waiting one from its place.
    pub(super) fn cut_off_silent_client(&mut self, now: Instant) {
        let (limits, grace) = (self.limits, self.grace);
        let stays = |client: &&Client| matches!(client.state, ClientState::Silent(_) | ClientState::Asked);
        let placed = ClientCounts::of(self.clients.iter().filter(stays));
        let waiting = self.clients.iter().filter(|client| client.state == ClientState::Waiting);
        let kept_out = waiting.map(|client| client.connector);
        let kept_out: Vec<_> = kept_out.filter(|&connector| !placed.leave_room(connector, limits, None)).collect();
        let in_the_way = |client: &&mut Client| {
            let makes_room = |&next: &Connector| placed.leave_room(next, limits, Some(client.connector));
            matches!(client.state, ClientState::Silent(since) if now.saturating_duration_since(since) >= grace)
                && kept_out.iter().any(makes_room)
        };
        if let Some(client) = self.clients.iter_mut().find(in_the_way) {
            client.state = ClientState::CutOff;
            // Its thread reads an end of file, and can still answer.
            let _ = client.socket.shutdown(Shutdown::Read);
        }
    }

    /// Lets a client that sent its request keep its place. False if it was cut off before.
    pub(super) fn keep(&mut self, number: u64) -> bool {
        let client = self.clients.iter_mut().find(|client| client.number == number);
        let in_time = client.filter(|client| client.state != ClientState::CutOff);
        in_time.map(|client| client.state = ClientState::Asked).is_some()
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.clients.retain(|client| client.number != number);
    }

    /// Ends admission, and drops the clients that wait.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.clients.retain(|client| client.state != ClientState::Waiting);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }
}

/// The number of clients, of each user and of each process.
struct ClientCounts {
    all: usize,
    users: HashMap<u32, usize>,
    processes: HashMap<Option<i32>, usize>,
}

impl ClientCounts {
    fn of<'a>(clients: impl Iterator<Item = &'a Client>) -> ClientCounts {
        let mut counts = ClientCounts { all: 0, users: HashMap::new(), processes: HashMap::new() };
        for Client { connector, .. } in clients {
            counts.all += 1;
            *counts.users.entry(connector.user).or_default() += 1;
            *counts.processes.entry(connector.process).or_default() += 1;
        }
        counts
    }

    /// The number of a client's user, and of its process.
    fn share(&self, of: Connector) -> (usize, usize) {
        let user = self.users.get(&of.user).copied().unwrap_or_default();
        (user, self.processes.get(&of.process).copied().unwrap_or_default())
    }

    /// True if there is a place for a client, once `without` has left its own.
    fn leave_room(&self, client: Connector, limits: Limits, without: Option<Connector>) -> bool {
        let (user, process) = self.share(client);
        let less = |is_same: fn(Connector, Connector) -> bool| {
            usize::from(without.is_some_and(|other| is_same(client, other)))
        };
        self.all - less(|_, _| true) < limits.all
            && user - less(|one, other| one.user == other.user) < limits.user
            && (client.process.is_none() || process - less(|one, other| one.process == other.process) < limits.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(places: &mut Places, user: u32, process: i32) -> (UnixStream, Option<Arc<UnixStream>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connector = Connector { user, process: (process > 0).then_some(process) };
        (theirs, places.queue(connector, ours))
    }

    /// The users and processes of the clients with places.
    fn placed(places: &Places) -> Vec<(u32, i32)> {
        let placed = places.clients.iter().filter(|client| client.state != ClientState::Waiting);
        placed.map(|client| (client.connector.user, client.connector.process.unwrap_or(0))).collect()
    }

    #[test]
    fn a_user_never_gets_all_places_and_a_process_gets_a_quarter() {
        for all in [1, 2, 3, 4, 5, 8, 16, 60, 256] {
            let mut places = Places::new(all, Duration::ZERO);
            let mut sockets = Vec::new();
            for number in 0..100 {
                sockets.push(queue(&mut places, 1, 1));
                sockets.push(queue(&mut places, 1, 2 + number));
            }
            while places.admit().is_some() {}
            let placed = placed(&places);
            let of_first = placed.iter().filter(|client| client.1 == 1).count();
            assert!(placed.len() < all.max(2), "{all}: {placed:?}");
            assert!(of_first >= 1 && of_first <= all.div_ceil(4), "{all}: {placed:?}");
            // Another user's client, which came last.
            if all > 1 {
                sockets.push(queue(&mut places, 2, 1000));
                assert!(places.admit().is_some(), "{all}");
            }
        }
        // Limits that nothing reaches.
        let mut places = Places::new(usize::MAX, Duration::ZERO);
        let _socket = queue(&mut places, 1, 1);
        assert!(places.admit().is_some());
    }

    #[test]
    fn a_free_place_goes_to_the_client_with_the_fewest_and_then_to_the_oldest() {
        let mut places = Places::new(4, Duration::ZERO);
        let _first: Vec<_> = [10, 11, 12].map(|process| queue(&mut places, 1, process)).into();
        let visitors: Vec<_> = std::iter::from_fn(|| places.admit()).collect();
        let _others = [(1, 13), (2, 20), (2, 21)].map(|(user, process)| queue(&mut places, user, process));
        assert!(places.admit().is_some());
        assert_eq!(placed(&places), [(1, 10), (1, 11), (1, 12), (2, 20)]);
        assert!(places.admit().is_none() && places.has_waiting());
        places.leave(visitors[0].number);
        assert!(places.admit().is_some());
        assert_eq!(placed(&places), [(1, 11), (1, 12), (2, 20), (2, 21)]);
    }

    #[test]
    fn a_process_that_is_not_visible_has_only_its_users_limit() {
        let mut places = Places::new(8, Duration::ZERO);
        let _sockets: Vec<_> = (0..20).map(|_| queue(&mut places, 65534, 0)).collect();
        assert_eq!(std::iter::from_fn(|| places.admit()).count(), 6);
    }

    #[test]
    fn the_oldest_silent_client_is_cut_off_if_that_makes_room_for_a_waiting_one() {
        let grace = Duration::from_secs(1);
        let mut places = Places::new(8, grace);
        let _other = queue(&mut places, 2, 20);
        let _sockets: Vec<_> = (0..2).map(|_| queue(&mut places, 1, 10)).collect();
        let visitors: Vec<_> = std::iter::from_fn(|| places.admit()).collect();
        let late = Instant::now() + grace;
        places.cut_off_silent_client(late);
        assert!(visitors.iter().all(|visitor| places.keep(visitor.number)), "no client waited");
        for client in &mut places.clients {
            client.state = ClientState::Silent(Instant::now());
        }
        let _next = queue(&mut places, 1, 10);
        assert!(places.admit().is_none());
        places.cut_off_silent_client(Instant::now());
        assert!(places.clients.iter().all(|client| client.state != ClientState::CutOff), "they had no time to ask");
        // The other user's is older, but not in the way. One is enough.
        let late = Instant::now() + grace;
        places.cut_off_silent_client(late);
        places.cut_off_silent_client(late);
        let cut_off: Vec<_> = places.clients.iter().map(|client| client.state == ClientState::CutOff).collect();
        assert_eq!(cut_off, [false, true, false, false]);
        assert!(!places.keep(1) && places.admit().is_none());
        places.leave(1);
        assert!(places.admit().is_some());
    }

    #[test]
    fn a_client_that_has_asked_is_not_cut_off() {
        let mut places = Places::new(1, Duration::ZERO);
        let _sockets = [queue(&mut places, 1, 1), queue(&mut places, 2, 2)];
        let number = places.admit().unwrap().number;
        assert!(places.keep(number));
        places.cut_off_silent_client(Instant::now() + Duration::from_secs(1));
        assert!(places.keep(number));
    }

    #[test]
    fn if_too_many_wait_the_oldest_of_the_greediest_process_is_refused() {
        let mut places = Places::new(1, Duration::ZERO);
        let mut sockets = vec![queue(&mut places, 2, 20)];
        for number in 0..MAX_WAITING as i32 - 1 {
            sockets.push(queue(&mut places, 1, if number % 2 == 0 { 10 } else { 100 + number }));
        }
        assert!(sockets.iter().all(|(_, refused)| refused.is_none()));
        sockets.push(queue(&mut places, 2, 20));
        assert!(sockets.last().unwrap().1.is_some());
        let left: Vec<_> = places.clients.iter().map(|client| client.number).collect();
        assert!(left.contains(&0) && !left.contains(&1) && left.len() == MAX_WAITING, "{left:?}");
    }

    #[test]
    fn no_client_waits_for_a_broker_that_has_stopped() {
        let mut places = Places::new(1, Duration::ZERO);
        let _sockets = [queue(&mut places, 1, 1), queue(&mut places, 1, 1)];
        let number = places.admit().unwrap().number;
        places.stop();
        assert!(!places.has_waiting() && places.keep(number));
        places.leave(number);
        let _socket = queue(&mut places, 1, 1);
        assert!(places.admit().is_none());
    }
}
