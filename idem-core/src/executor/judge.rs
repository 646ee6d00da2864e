//! What the end of an operation means for the store.

use super::outcomes::Settlement;
use crate::outcome::Outcome;

/// Judges what an operation ended in, an `R`, of which a `V` goes to the caller.
///
/// `V` is no associated type: with `Send` asked of such a one, the compiler refuses callers' futures that hold borrowed
/// errors, such as `&'static str`.
pub(super) trait Judge<R, V>: Send + 'static {
    /// Divides it between the caller and the store. May be foreign code, and panic.
    fn settle(&self, ended: R, limit: usize) -> (V, Settlement);

    /// Whether it says the same as the outcome with which the operation has completed its lease itself.
    fn agrees(ended: &R, outcome: &Outcome) -> bool;

    /// What goes to the caller where nothing goes to the store.
    fn value(ended: R) -> V;

    /// Whether the caller gets in its place another outcome that turns out to be stored of this attempt.
    fn gives_way(value: &V) -> bool;
}
