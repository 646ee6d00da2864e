//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use idem_benches::Failed;
use idem_benches::backends::{Backend, unknown};
use idem_benches::fdb;
use idem_benches::load::mix::Mix;
use idem_benches::load::run::Plan;
use idem_benches::servers::{Postgres, Redis, Servers};

/// Arrivals a second where none are asked for: where a sweep begins.
pub(crate) const FIRST_RATE: f64 = 1_000.0;

/// For how long a sweep stays at each rate.
const AT_EACH: f64 = 5.0;

/// Lets arrivals come at a fixed rate, checks every answer, and tells their latency from the intended start on.
///
/// Fails when a key took effect twice or was replayed with another outcome; and, at a rate that is given without --p99,
/// when an arrival met an error or was never answered.
#[derive(Debug, Parser)]
#[command(name = "idem-load", max_term_width = 120)]
pub(crate) struct Options {
    /// A backend by name, on a private server that is started for it (memory, postgres, postgres-unbatched, redis,
    /// redis-cluster, fdb, fdb-unbatched, and each with -cached), or one that runs: postgres://…, redis://…, fdb:PATH (its
    /// cluster file). Or all that are present, without -cached, one after the other: each at the rate and, where it does not
    /// hold it, at the highest that it holds
    #[arg(long, default_value = "memory")]
    store: String,
    /// Put the near-cache before a store that runs.
    #[arg(long)]
    cached: bool,
    /// Arrivals a second; with --sweep, the first rate. [default: 1000]
    #[arg(long, value_parser = positive)]
    pub(crate) rate: Option<f64>,
    /// For how long; with --sweep, at each rate. [default: 10, with --sweep 5]
    #[arg(long, value_parser = positive)]
    seconds: Option<f64>,
    /// For how long before that, uncounted.
    #[arg(long, default_value = "1", value_parser = not_negative)]
    warm_up: f64,
    /// Find the highest rate that is held.
    #[arg(long, requires = "p99")]
    pub(crate) sweep: bool,
    /// What 99 of a hundred arrivals must not exceed, such as 50ms: the limit of a sweep, and of --store all.
    #[arg(long, value_parser = milliseconds)]
    pub(crate) p99: Option<f64>,
    /// The share of arrivals that repeat a completed key, and must be replayed.
    #[arg(long, default_value = "0.1")]
    repeats: f64,
    /// The share of arrivals that come at once with the first request of their key.
    #[arg(long, default_value = "0.01")]
    duplicates: f64,
    /// The share of runs that fail, and are retried.
    #[arg(long, default_value = "0.01")]
    failures: f64,
    /// Draw all keys by Zipf's law with this exponent (such as 1.1), instead of the shares of repeats and duplicates.
    #[arg(long, value_name = "EXPONENT")]
    zipf: Option<f64>,
    /// From so many keys.
    #[arg(long, default_value = "1000000", requires = "zipf")]
    keys: u64,
    /// Bytes of each outcome.
    #[arg(long, default_value = "256")]
    body: usize,
    /// Records that are there before.
    #[arg(long, default_value = "0")]
    pub(crate) preload: u64,
    /// Arrivals that may be under way at once; more are refused, and counted.
    #[arg(long, default_value = "50000")]
    queue: usize,
    /// After a third of the time the day changes, after two thirds an old day is dropped (Postgres); FoundationDB clears
    /// one then; elsewhere old records are purged or expire.
    #[arg(long, conflicts_with = "sweep")]
    pub(crate) events: bool,
    /// Records that are old then.
    #[arg(long, default_value = "100000", requires = "events")]
    pub(crate) old: u64,
    /// Write all figures to this file, as JSON.
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
    /// Draw a picture into this file: latency against the rate (--sweep), or over time.
    #[arg(long)]
    pub(crate) svg: Option<PathBuf>,
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number: &f64| number.is_finite()).ok_or_else(|| format!("{text} is not a number"))
}

fn positive(text: &str) -> Result<f64, String> {
    Some(number(text)?).filter(|number| *number > 0.0).ok_or_else(|| "it has to be more than 0".to_owned())
}

fn not_negative(text: &str) -> Result<f64, String> {
    Some(number(text)?).filter(|number| *number >= 0.0).ok_or_else(|| "it must not be negative".to_owned())
}

fn milliseconds(text: &str) -> Result<f64, String> {
    let (digits, factor) = if let Some(digits) = text.strip_suffix("ms") {
        (digits, 1.0)
    } else if let Some(digits) = text.strip_suffix('s') {
        (digits, 1_000.0)
    } else {
        return Err("say its unit: 50ms, or 1s".to_owned());
    };
    Ok(positive(digits)? * factor)
}

impl Options {
    /// Whether all backends are wanted.
    pub(crate) fn is_all(&self) -> bool {
        self.store == "all"
    }

    pub(crate) fn mix(&self) -> Result<Mix, Failed> {
        if self.p99.is_some() != (self.sweep || self.is_all()) {
            return Err("--p99 is the limit of a --sweep, and --store all needs it as well".into());
        }
        if self.is_all() && (self.events || self.cached || self.svg.is_some()) {
            return Err("--events, --cached and --svg are for one store".into());
        }
        if self.queue == 0 {
            return Err("--queue 0 would refuse everything".into());
        }
        let mix = Mix {
            repeats: self.repeats,
            duplicates: self.duplicates,
            failures: self.failures,
            zipf: self.zipf,
            keys: self.keys,
            body: self.body,
        };
        mix.validate()?;
        Ok(mix)
    }

    /// A run at that rate. Its number is left to whoever makes several.
    pub(crate) fn plan(&self, mix: Mix, rate: f64) -> Plan {
        let seconds = self.seconds.unwrap_or(if self.sweep { AT_EACH } else { 10.0 });
        Plan {
            rate,
            time: Duration::from_secs_f64(seconds),
            warm_up: Duration::from_secs_f64(self.warm_up),
            queue: self.queue,
            mix,
            number: 0,
            preloaded: self.preload,
        }
    }

    /// The same as a step of the sweep that follows where a rate is not held.
    pub(crate) fn step(&self, mix: Mix, rate: f64) -> Plan {
        let plan = self.plan(mix, rate);
        Plan { time: plan.time.min(Duration::from_secs_f64(AT_EACH)), ..plan }
    }

    /// The servers, and the backend on them.
    pub(crate) fn store(&self) -> Result<(Servers, &'static Backend), Failed> {
        let file = self.store.strip_prefix("fdb:").filter(|file| !file.starts_with("//"));
        let scheme = self.store.split_once("://").map(|(scheme, _)| scheme);
        let (servers, name) = match scheme {
            None if file == Some("") => return Err("fdb: needs the path of a cluster file behind it".into()),
            None => match file {
                Some(file) => (Servers::with_fdb(fdb::Server::given(file)?), "fdb"),
                None => (Servers::default(), self.store.as_str()),
            },
            Some("postgres" | "postgresql") => {
                (Servers::with_postgres(Postgres::given(self.store.clone())), "postgres")
            }
            Some("redis") => (Servers::with_redis(Redis::given(self.store.clone())), "redis"),
            Some(other) => return Err(format!("no backend has URLs that begin with {other}://").into()),
        };
        let name = if self.cached && !name.ends_with("-cached") { format!("{name}-cached") } else { name.to_owned() };
        let backend = Backend::named(&name).ok_or_else(|| unknown(&name))?;
        Ok((servers, backend))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_a_unit() {
        assert_eq!(milliseconds("50ms"), Ok(50.0));
        assert_eq!(milliseconds("1.5s"), Ok(1_500.0));
        for text in ["50", "0ms", "-1ms", "ms", "infs"] {
            assert!(milliseconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let parse = |arguments: &str| Options::try_parse_from(format!("idem-load {arguments}").split(' '));
        for arguments in ["--rate 0", "--rate NaN", "--sweep", "--sweep --p99 5", "--seconds -1", "--keys 5", "--old 3"]
        {
            assert!(parse(arguments).is_err(), "{arguments}");
        }
        for arguments in [
            "--repeats 2",
            "--repeats 0.6 --duplicates 0.6",
            "--p99 1ms",
            "--queue 0",
            "--body 3",
            "--store all",
            "--store all --p99 1s --events",
        ] {
            assert!(parse(arguments).unwrap().mix().is_err(), "{arguments}");
        }
        for store in ["redid", "mysql://localhost", "fdb:", "fdb:/no/such/file"] {
            assert!(parse(&format!("--store {store}")).unwrap().store().is_err(), "{store}");
        }
        assert_eq!(parse("--store redis://localhost --cached").unwrap().store().unwrap().1.name, "redis-cached");
    }
}
