//! An open-loop load: arrivals come at a fixed rate, whether earlier ones are answered or not, and their latency counts from
//! when they should have begun. So a store that stalls is charged for all who would have come meanwhile.
//!
//! Every answer is checked against a table of what has become of each key: see [`effects`].

pub mod effects;
pub mod events;
pub mod mix;
pub mod preload;
pub mod report;
pub mod run;
pub mod sweep;
