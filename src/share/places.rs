//! The places of a broker: who is served, who waits, and who has to go.
//!
//! One user never has all places, and one process a quarter of them at most, so that neither can
//! keep all others out. A client for which there is no place waits. A place that becomes free goes
//! to the waiting client whose user, then whose process, has the fewest places.
//!
//! A client that has a place and does not ask keeps it for [`Places::grace`] if somebody waits for
//! it: the oldest of them goes first. If too many wait, the oldest goes of the process that has the
//! most of them, of the user that has the most.
//!
//! Who a client is comes from the socket: who connected. That is known before it has sent anything,
//! and decides about nothing but places.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Connector {
    /// As this process's user namespace numbers it.
    pub(super) user: u32,
    /// `None` if this process's pid namespace does not see it: then its user's limit holds alone.
    pub(super) process: Option<i32>,
}

/// A client that has a place: the number by which [`Places`] knows it, and its socket.
pub(super) type Guest = (u64, Arc<UnixStream>);

#[derive(Debug)]
pub(super) struct Places {
    limits: Limits,
    grace: Duration,
    /// In the order in which they came.
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
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    /// It has a place since then, and has not asked for anything yet.
    Silent(Instant),
    Asked,
    /// It was silent for too long; its thread is about to leave the place.
    CutOff,
}

/// More clients do not wait.
const WAITING: usize = 256;

impl Places {
    pub(super) fn new(all: usize, grace: Duration) -> Places {
        // Not all of them for one user, where there are two or more.
        let limits = Limits { all, user: (all - (all / 4).max(1)).max(1), process: all.div_ceil(4) };
        Places { limits, grace, clients: Vec::new(), next: 0, stopped: false }
    }

    /// How long a silent client keeps a place that somebody waits for.
    pub(super) fn grace(&self) -> Duration {
        self.grace
    }

    /// A client comes, and waits. Returns the one that has to go if too many wait now.
    pub(super) fn arrive(&mut self, connector: Connector, socket: UnixStream) -> Option<Arc<UnixStream>> {
        if self.stopped {
            return None;
        }
        let (number, socket) = (self.next, Arc::new(socket));
        self.next += 1;
        self.clients.push(Client { number, connector, socket, state: State::Waiting });
        let waiting = Counts::of(self.clients.iter().filter(|client| client.state == State::Waiting));
        if waiting.all <= WAITING {
            return None;
        }
        let share = |client: &Client| (client.state == State::Waiting).then(|| waiting.share(client.connector));
        let largest = self.clients.iter().filter_map(share).max();
        let oldest = self.clients.iter().position(|client| share(client) == largest)?;
        Some(self.clients.remove(oldest).socket)
    }

    /// Gives a place to the next client that waits, if there is one for it.
    pub(super) fn next(&mut self) -> Option<Guest> {
        let limits = self.limits;
        let placed = Counts::of(self.clients.iter().filter(|client| client.state != State::Waiting));
        let waiting = self.clients.iter_mut().filter(|client| client.state == State::Waiting);
        let fitting = waiting.filter(|client| placed.leave_room(client.connector, limits, None));
        // Of equal ones the oldest.
        let client = fitting.min_by_key(|client| placed.share(client.connector))?;
        client.state = State::Silent(Instant::now());
        Some((client.number, client.socket.clone()))
    }

    /// Whether somebody waits.
    pub(super) fn is_wanted(&self) -> bool {
        self.clients.iter().any(|client| client.state == State::Waiting)
    }

    /// Cuts off the oldest silent client that keeps a waiting one from its place.
    pub(super) fn make_room(&mut self, now: Instant) {
        let (limits, grace) = (self.limits, self.grace);
        let stays = |client: &&Client| matches!(client.state, State::Silent(_) | State::Asked);
        let placed = Counts::of(self.clients.iter().filter(stays));
        let waiting = self.clients.iter().filter(|client| client.state == State::Waiting);
        let kept_out = waiting.map(|client| client.connector);
        let kept_out: Vec<_> = kept_out.filter(|&connector| !placed.leave_room(connector, limits, None)).collect();
        let in_the_way = |client: &&mut Client| {
            let makes_room = |&next: &Connector| placed.leave_room(next, limits, Some(client.connector));
            matches!(client.state, State::Silent(since) if now.saturating_duration_since(since) >= grace)
                && kept_out.iter().any(makes_room)
        };
        if let Some(client) = self.clients.iter_mut().find(in_the_way) {
            client.state = State::CutOff;
            // Its thread reads the end of the request, and can still answer.
            let _ = client.socket.shutdown(Shutdown::Read);
        }
    }

    /// A client has asked, and keeps its place. False if it was cut off before.
    pub(super) fn ask(&mut self, number: u64) -> bool {
        let client = self.clients.iter_mut().find(|client| client.number == number);
        let in_time = client.filter(|client| client.state != State::CutOff);
        in_time.map(|client| client.state = State::Asked).is_some()
    }

    pub(super) fn leave(&mut self, number: u64) {
        self.clients.retain(|client| client.number != number);
    }

    /// Nobody gets a place any more.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.clients.retain(|client| client.state != State::Waiting);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }
}

/// How many clients there are, of each user and of each process.
struct Counts {
    all: usize,
    users: HashMap<u32, usize>,
    processes: HashMap<Option<i32>, usize>,
}

impl Counts {
    fn of<'a>(clients: impl Iterator<Item = &'a Client>) -> Counts {
        let mut counts = Counts { all: 0, users: HashMap::new(), processes: HashMap::new() };
        for Client { connector, .. } in clients {
            counts.all += 1;
            *counts.users.entry(connector.user).or_default() += 1;
            *counts.processes.entry(connector.process).or_default() += 1;
        }
        counts
    }

    /// How many are of a client's user, and of its process.
    fn share(&self, of: Connector) -> (usize, usize) {
        let user = self.users.get(&of.user).copied().unwrap_or_default();
        (user, self.processes.get(&of.process).copied().unwrap_or_default())
    }

    /// Whether there is a place for a client, if another one left its own.
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

    fn arrive(places: &mut Places, user: u32, process: i32) -> (UnixStream, Option<Arc<UnixStream>>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connector = Connector { user, process: (process > 0).then_some(process) };
        (theirs, places.arrive(connector, ours))
    }

    /// The users and processes of the clients with places.
    fn placed(places: &Places) -> Vec<(u32, i32)> {
        let placed = places.clients.iter().filter(|client| client.state != State::Waiting);
        placed.map(|client| (client.connector.user, client.connector.process.unwrap_or(0))).collect()
    }

    #[test]
    fn a_user_gets_not_all_places_and_a_process_a_quarter_however_many_there_are() {
        for all in [1, 2, 3, 4, 5, 8, 16, 60, 256] {
            let mut places = Places::new(all, Duration::ZERO);
            let mut sockets = Vec::new();
            for number in 0..100 {
                sockets.push(arrive(&mut places, 1, 1));
                sockets.push(arrive(&mut places, 1, 2 + number));
            }
            while places.next().is_some() {}
            let placed = placed(&places);
            let of_first = placed.iter().filter(|client| client.1 == 1).count();
            assert!(placed.len() < all.max(2), "{all}: {placed:?}");
            assert!(of_first >= 1 && of_first <= all.div_ceil(4), "{all}: {placed:?}");
            // Another user's client, which came last.
            if all > 1 {
                sockets.push(arrive(&mut places, 2, 1000));
                assert!(places.next().is_some(), "{all}");
            }
        }
        // Limits that nothing reaches.
        let mut places = Places::new(usize::MAX, Duration::ZERO);
        let _socket = arrive(&mut places, 1, 1);
        assert!(places.next().is_some());
    }

    #[test]
    fn a_free_place_goes_to_who_has_the_fewest_and_then_to_who_came_first() {
        let mut places = Places::new(4, Duration::ZERO);
        let _first: Vec<_> = [10, 11, 12].map(|process| arrive(&mut places, 1, process)).into();
        let guests: Vec<_> = std::iter::from_fn(|| places.next()).collect();
        let _others = [(1, 13), (2, 20), (2, 21)].map(|(user, process)| arrive(&mut places, user, process));
        assert!(places.next().is_some());
        assert_eq!(placed(&places), [(1, 10), (1, 11), (1, 12), (2, 20)]);
        assert!(places.next().is_none() && places.is_wanted());
        places.leave(guests[0].0);
        assert!(places.next().is_some());
        assert_eq!(placed(&places), [(1, 11), (1, 12), (2, 20), (2, 21)]);
    }

    #[test]
    fn a_process_that_is_not_visible_has_its_users_limit() {
        let mut places = Places::new(8, Duration::ZERO);
        let _sockets: Vec<_> = (0..20).map(|_| arrive(&mut places, 65534, 0)).collect();
        assert_eq!(std::iter::from_fn(|| places.next()).count(), 6);
    }

    #[test]
    fn the_oldest_silent_client_goes_if_that_makes_room_for_one_that_waits() {
        let grace = Duration::from_secs(1);
        let mut places = Places::new(8, grace);
        let _other = arrive(&mut places, 2, 20);
        let _sockets: Vec<_> = (0..2).map(|_| arrive(&mut places, 1, 10)).collect();
        let guests: Vec<_> = std::iter::from_fn(|| places.next()).collect();
        let late = Instant::now() + grace;
        places.make_room(late);
        assert!(guests.iter().all(|(number, _)| places.ask(*number)), "nobody waited");
        for client in &mut places.clients {
            client.state = State::Silent(Instant::now());
        }
        let _next = arrive(&mut places, 1, 10);
        assert!(places.next().is_none());
        places.make_room(Instant::now());
        assert!(places.clients.iter().all(|client| client.state != State::CutOff), "they had no time to ask");
        // The other user's is older, but not in the way. One is enough.
        let late = Instant::now() + grace;
        places.make_room(late);
        places.make_room(late);
        let cut_off: Vec<_> = places.clients.iter().map(|client| client.state == State::CutOff).collect();
        assert_eq!(cut_off, [false, true, false, false]);
        assert!(!places.ask(1) && places.next().is_none());
        places.leave(1);
        assert!(places.next().is_some());
    }

    #[test]
    fn who_has_asked_is_not_cut_off() {
        let mut places = Places::new(1, Duration::ZERO);
        let _sockets = [arrive(&mut places, 1, 1), arrive(&mut places, 2, 2)];
        let (number, _) = places.next().unwrap();
        assert!(places.ask(number));
        places.make_room(Instant::now() + Duration::from_secs(1));
        assert!(places.ask(number));
    }

    #[test]
    fn if_too_many_wait_the_oldest_of_the_greediest_process_goes() {
        let mut places = Places::new(1, Duration::ZERO);
        let mut sockets = vec![arrive(&mut places, 2, 20)];
        for number in 0..WAITING as i32 - 1 {
            sockets.push(arrive(&mut places, 1, if number % 2 == 0 { 10 } else { 100 + number }));
        }
        assert!(sockets.iter().all(|(_, refused)| refused.is_none()));
        sockets.push(arrive(&mut places, 2, 20));
        assert!(sockets.last().unwrap().1.is_some());
        let left: Vec<_> = places.clients.iter().map(|client| client.number).collect();
        assert!(left.contains(&0) && !left.contains(&1) && left.len() == WAITING, "{left:?}");
    }

    #[test]
    fn nobody_waits_where_nobody_is_served_any_more() {
        let mut places = Places::new(1, Duration::ZERO);
        let _sockets = [arrive(&mut places, 1, 1), arrive(&mut places, 1, 1)];
        let (number, _) = places.next().unwrap();
        places.stop();
        assert!(!places.is_wanted() && places.ask(number));
        places.leave(number);
        let _socket = arrive(&mut places, 1, 1);
        assert!(places.next().is_none());
    }
}
