//! The cases, by rule of the contract. Each gets a fresh store.

use std::future::Future;
use std::pin::Pin;

use crate::context::Ctx;
use crate::harness::{Abilities, Time};
use crate::verdict::Verdict;

mod batches;
mod expiry;
mod fencing;
mod fingerprints;
mod histories;
mod leases;
mod limits;
mod outcomes;
mod purging;
mod races;
mod repeats;
mod trouble;

/// One case.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    /// Its name, which begins with its rule.
    pub(crate) name: &'static str,
    /// The rule that it is about.
    pub(crate) rule: &'static str,
    pub(crate) needs: Needs,
    pub(crate) run: for<'a> fn(&'a Ctx) -> Pin<Box<dyn Future<Output = Verdict> + Send + 'a>>,
}

/// What a case needs of the harness, and how it is run.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    advance: bool,
    reopen: bool,
    disturb: bool,
    garble: bool,
    once: bool,
}

impl Needs {
    const NONE: Self = Self { advance: false, reopen: false, disturb: false, garble: false, once: false };

    /// A clock that can be moved.
    const fn advance(self) -> Self {
        Self { advance: true, ..self }
    }

    const fn reopen(self) -> Self {
        Self { reopen: true, ..self }
    }

    const fn disturb(self) -> Self {
        Self { disturb: true, ..self }
    }

    const fn garble(self) -> Self {
        Self { garble: true, ..self }
    }

    /// Nothing is gained by delivering its calls twice.
    const fn once(self) -> Self {
        Self { once: true, ..self }
    }

    /// What is missing, if anything.
    pub(crate) fn missing(self, abilities: Abilities) -> Option<&'static str> {
        if self.advance && abilities.time == Time::Real {
            Some("advance")
        } else if self.reopen && !abilities.reopen {
            Some("reopen")
        } else if self.disturb && !abilities.disturb {
            Some("disturb")
        } else if self.garble && !abilities.garble {
            Some("garble")
        } else {
            None
        }
    }

    /// Whether it is also run with every call delivered twice.
    pub(crate) fn also_twice(self) -> bool {
        !self.once
    }
}

/// The table of a file's cases: rule, name, and what it needs.
macro_rules! cases {
    ($($rule:ident $name:ident $([$($need:ident),+])?;)+) => {
        pub(super) const CASES: &[$crate::cases::Case] = &[$(
            $crate::cases::Case {
                rule: stringify!($rule),
                name: stringify!($name),
                needs: $crate::cases::Needs::NONE$($(.$need())+)?,
                run: |ctx| Box::pin($name(ctx)),
            },
        )+];
    };
}

use cases;

/// Every case there is.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    [
        races::CASES,
        fingerprints::CASES,
        repeats::CASES,
        leases::CASES,
        fencing::CASES,
        outcomes::CASES,
        expiry::CASES,
        limits::CASES,
        trouble::CASES,
        purging::CASES,
        batches::CASES,
        histories::CASES,
    ]
    .into_iter()
    .flatten()
}
