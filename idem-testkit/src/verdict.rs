//! How a case ends.

use std::fmt;

use idem_core::StoreError;

use crate::harness::HarnessError;

/// What a case found.
pub(crate) type Verdict<T = ()> = Result<T, Failed>;

/// Why a case did not pass.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The store broke the contract.
    Broken(String),
    /// The store broke the contract in the history of that seed.
    Illegal {
        /// The seed.
        seed: u64,
        /// The history.
        found: String,
    },
    /// The machine was too slow to tell: the case is to be run again.
    Inconclusive(String),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broken(what) | Self::Illegal { found: what, .. } => f.write_str(what),
            Self::Inconclusive(what) => write!(f, "could not be told in time: {what}"),
        }
    }
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::Broken(format!("the store answered with an error where the contract has an answer: {error:?}"))
    }
}

impl From<HarnessError> for Failed {
    fn from(error: HarnessError) -> Self {
        Self::Broken(format!("the harness failed: {error}"))
    }
}

/// Fails the case unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::verdict::Failed::Broken(format!($($text)+)));
        }
    };
}

/// Fails the case unless both are equal.
macro_rules! ensure_eq {
    ($found:expr, $wanted:expr, $($text:tt)+) => {
        match (&$found, &$wanted) {
            (found, wanted) => {
                if found != wanted {
                    return Err($crate::verdict::Failed::Broken(format!(
                        "{}: found {found:?}, wanted {wanted:?}",
                        format_args!($($text)+)
                    )));
                }
            }
        }
    };
}

/// Fails the case unless the value matches the pattern; gives what the pattern binds.
macro_rules! ensure_is {
    ($found:expr, $pattern:pat => $bound:expr, $($text:tt)+) => {
        match $found {
            $pattern => $bound,
            #[allow(unreachable_patterns)]
            other => {
                return Err($crate::verdict::Failed::Broken(format!(
                    "{}: found {other:?}, wanted {}",
                    format_args!($($text)+),
                    stringify!($pattern)
                )));
            }
        }
    };
}

pub(crate) use {ensure, ensure_eq, ensure_is};
