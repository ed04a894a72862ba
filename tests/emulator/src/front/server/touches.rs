//! Forbidden CPU accesses. The server finds them some time after they happened.

use super::Server;
use crate::front::client_process;
use crate::front::descendants;
use std::time::{Duration, Instant};

/// How often touches are looked for.
pub(super) const WATCH: Duration = Duration::from_millis(20);

impl Server {
    /// Looks for forbidden CPU accesses.
    pub(super) fn watch(&mut self) {
        if !self.driver.svm.has_segments() {
            return;
        }
        let now = Instant::now();
        if now < self.watch {
            return;
        }
        self.watch = now + WATCH;
        self.driver.svm.report_floods(&mut self.driver.machine);
        for client in self.driver.svm.with_segments() {
            // The server's own process gives its children no mappings.
            if client != self.own_tgid {
                self.charge_descendants(client);
            }
        }
        self.kill_trapped_clients();
    }

    /// Finds touches of children in the mappings that they inherited from a client.
    fn charge_descendants(&mut self, client: i32) {
        let descendants = self.descendants.refresh(client);
        if descendants.is_empty() {
            return;
        }
        while let Some((offset, address)) = self.driver.svm.touched(client) {
            let own = descendants::has_page(client, address);
            let touching = descendants.iter().copied().find(|pid| descendants::has_page(*pid, address) == Some(true));
            let child = match (own, touching) {
                // Of a page that both have, the client is responsible.
                (Some(true), _) => None,
                (_, Some(child)) => {
                    client_process::kill_child(child);
                    Some(child)
                }
                // The child has ended since the last look.
                (Some(false), None) => descendants.last().copied(),
                (None, None) => None,
            };
            let Some(child) = child else { return };
            self.driver.svm.charge(&mut self.driver.machine, client, child, offset);
        }
    }
}
