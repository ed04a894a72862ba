//! `ASCEND_RT_VISIBLE_DEVICES`: which devices a user sees.

use crate::error::Finding;
use crate::id::{LogicalId, UserId};

/// The value of `ASCEND_RT_VISIBLE_DEVICES`: which logical device each user id stands for.
///
/// If it is unset, user ids are logical ids. The list ends at the first entry that is not a number
/// or that appeared before. This follows the vendor's documentation and was not verified on
/// hardware.
///
/// ```
/// use ascend_vmm::{LogicalId, UserId, discovery::VisibleDevices};
///
/// let visible = VisibleDevices::from("2,3");
/// assert_eq!(visible.user(LogicalId(3)), Some(UserId(1)));
/// assert_eq!(visible.user(LogicalId(1)), None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VisibleDevices(Option<Vec<LogicalId>>);

impl VisibleDevices {
    /// Name of the environment variable.
    pub const VARIABLE: &'static str = "ASCEND_RT_VISIBLE_DEVICES";

    /// Every device, under its logical id.
    pub fn all() -> Self {
        VisibleDevices(None)
    }

    /// The value in this process's environment.
    pub fn from_environment() -> Self {
        match std::env::var_os(Self::VARIABLE) {
            // An entry that is not text is not a number either: it ends the list.
            Some(value) => VisibleDevices::from(&*value.to_string_lossy()),
            None => VisibleDevices::all(),
        }
    }

    /// The user id of a device; `None` if the list hides it.
    pub fn user(&self, logical: LogicalId) -> Option<UserId> {
        match &self.0 {
            None => Some(UserId(logical.0)),
            Some(list) => list.iter().position(|&id| id == logical).and_then(|at| u32::try_from(at).ok()).map(UserId),
        }
    }

    /// What is wrong with the value in this process's environment on a host with these devices.
    pub(crate) fn finding(listed: &[LogicalId]) -> Option<Finding> {
        let value = std::env::var_os(Self::VARIABLE)?.to_string_lossy().into_owned();
        if value.trim().is_empty() {
            return Some(Finding::VisibleDevicesEmpty);
        }
        let shown = VisibleDevices::from(value.as_str()).0.unwrap_or_default();
        if let Some(entry) = value.split(',').nth(shown.len()) {
            return Some(Finding::VisibleDevicesUnreadable { entry: entry.to_owned(), kept: shown.len(), value });
        }
        let absent: Vec<u32> = shown.iter().filter(|id| !listed.contains(id)).map(|id| id.0).collect();
        // Without any device there is a worse finding.
        let some = !absent.is_empty() && !listed.is_empty();
        some.then_some(Finding::VisibleDevicesAbsent { value, absent, listed: listed.len() })
    }
}

impl From<&str> for VisibleDevices {
    fn from(text: &str) -> Self {
        let mut list = Vec::new();
        for entry in text.split(',') {
            match entry.trim().parse() {
                Ok(id) if !list.contains(&id) => list.push(id),
                _ => break,
            }
        }
        VisibleDevices(Some(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_list_user_ids_are_logical_ids() {
        let visible = VisibleDevices::all();
        assert_eq!(visible.user(LogicalId(5)), Some(UserId(5)));
    }

    #[test]
    fn an_empty_list_hides_every_device() {
        let visible = VisibleDevices::from("");
        assert_eq!(visible.user(LogicalId(0)), None);
    }

    #[test]
    fn the_list_ends_at_the_first_bad_or_repeated_entry() {
        assert_eq!(VisibleDevices::from("4, 2,x,1"), VisibleDevices(Some(vec![LogicalId(4), LogicalId(2)])));
        assert_eq!(VisibleDevices::from("1,1,2"), VisibleDevices(Some(vec![LogicalId(1)])));
        assert_eq!(VisibleDevices::from("-1,0"), VisibleDevices(Some(vec![])));
    }
}
