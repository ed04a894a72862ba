//! A measured figure and its target.

use serde::Serialize;
use std::fmt;

/// What a figure counts or measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Quantity {
    /// User-space instructions.
    #[serde(rename = "instructions")]
    Instructions,
    /// System calls.
    #[serde(rename = "system calls")]
    Calls,
    /// System calls that are ioctls.
    #[serde(rename = "ioctls")]
    Ioctls,
    /// Bytes of the process's own memory.
    #[serde(rename = "bytes")]
    Bytes,
    /// CPU time.
    #[serde(rename = "microseconds")]
    Microseconds,
    /// A ratio to another time of the same run.
    #[serde(rename = "times")]
    Times,
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Quantity::Instructions => "instructions",
            Quantity::Calls => "system calls",
            Quantity::Ioctls => "ioctls",
            Quantity::Bytes => "bytes",
            Quantity::Microseconds => "µs",
            Quantity::Times => "times",
        })
    }
}

/// How a figure compares with its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// Within the limit.
    #[serde(rename = "kept")]
    Kept,
    /// Beyond the limit.
    #[serde(rename = "missed")]
    Missed,
    /// There is no target.
    #[serde(rename = "shown")]
    Shown,
    /// It could not be measured.
    #[serde(rename = "not measured")]
    NotMeasured,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Kept => "kept",
            Verdict::Missed => "MISSED",
            Verdict::Shown => "",
            Verdict::NotMeasured => "not measured",
        })
    }
}

/// The target of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Target {
    /// The limit.
    pub must: Option<f64>,
    /// The figure of the vendor's library, counted without a kernel on x86_64.
    pub vendor: Option<f64>,
}

impl Target {
    /// A target with this limit only.
    pub fn must(must: f64) -> Target {
        Target { must: Some(must), ..Target::default() }
    }

    /// Adds the figure of the vendor's library.
    pub fn vendor(self, vendor: f64) -> Target {
        Target { vendor: Some(vendor), ..self }
    }
}

/// A figure, measured or not.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// The operation.
    pub name: String,
    /// Live objects of the kind during the measurement.
    pub live: Option<u64>,
    /// What it counts or measures.
    pub unit: Quantity,
    /// The measured number; `reason` says why there is none.
    pub measured: Option<f64>,
    /// The target.
    #[serde(flatten)]
    pub target: Target,
    /// How the two compare.
    pub verdict: Verdict,
    /// Why it could not be measured.
    pub reason: Option<String>,
}

impl Figure {
    /// Compares a measurement with its target.
    pub fn new(
        name: impl Into<String>,
        live: Option<u64>,
        unit: Quantity,
        measured: Result<f64, String>,
        target: Target,
    ) -> Figure {
        let (measured, reason) = match measured {
            Ok(measured) => (Some(measured), None),
            Err(reason) => (None, Some(reason)),
        };
        let verdict = match measured {
            None => Verdict::NotMeasured,
            Some(_) if target.must.is_none() => Verdict::Shown,
            Some(measured) if target.must.is_some_and(|must| measured > must) => Verdict::Missed,
            Some(_) => Verdict::Kept,
        };
        Figure { name: name.into(), live, unit, measured, target, verdict, reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(measured: Result<f64, String>, target: Target) -> Verdict {
        Figure::new("x", None, Quantity::Calls, measured, target).verdict
    }

    #[test]
    fn a_figure_is_compared_with_its_limit() {
        let target = Target::must(600.0).vendor(2082.0);
        assert_eq!(verdict(Ok(600.0), target), Verdict::Kept);
        assert_eq!(verdict(Ok(600.1), target), Verdict::Missed);
        assert_eq!(verdict(Ok(1e9), Target::default()), Verdict::Shown);
    }

    #[test]
    fn a_figure_without_a_measurement_is_not_kept() {
        assert_eq!(verdict(Err("no ptrace".into()), Target::must(1.0)), Verdict::NotMeasured);
    }
}
