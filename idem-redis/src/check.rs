//! Looks whether the server keeps what the contract promises.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use idem_core::{ErrorClass, ErrorKind, Key, Operation, Reserve, StoreError};
use redis::{Cmd, Value, cmd};
use tracing::warn;

use crate::calls::{Call, Calls};
use crate::config::{Acknowledge, Config, Fsync, Policy};
use crate::error::{RedisStoreError, STORE, Trouble, own_error};

/// What a server is, and how it is set up: of each master, on a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerReport {
    /// The node's address on a cluster; `None` for a single server.
    pub node: Option<String>,
    /// Whether it is Valkey; Redis otherwise.
    pub valkey: bool,
    /// Its version, such as `7.0.15`.
    pub version: String,
    /// What it may lose, the worst first. Empty where nothing was found.
    pub findings: Vec<Finding>,
}

/// A setting with which a server loses what it has acknowledged.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Finding {
    /// Under memory pressure it evicts keys, live records among them: their operations run again. Every record has an
    /// expiry, so the `volatile-…` policies are no better. Set `maxmemory-policy noeviction`.
    Evicts {
        /// Its `maxmemory-policy`.
        policy: String,
    },
    /// It keeps nothing on disk: all records are gone when it restarts. Set `appendonly yes`.
    NoPersistence,
    /// It keeps snapshots only: what was written since the latest is gone when it crashes. Set `appendonly yes`.
    SnapshotsOnly,
    /// It leaves writing to the operating system: the last half minute or so is gone when the machine crashes. Set
    /// `appendfsync everysec` or `always`.
    NeverSyncs,
    /// It syncs once a second: the last one or two seconds are gone when the machine crashes. `appendfsync always`
    /// loses nothing.
    SyncsEverySecond,
    /// It has replicas and nothing waits for them: what they have not yet received is gone when one takes over. See
    /// [`Acknowledge::replicas`].
    ReplicasNotAwaited {
        /// How many replicas it has.
        replicas: u32,
    },
    /// It has fewer replicas than calls wait for: every write will be told to be unknown.
    TooFewReplicas {
        /// How many replicas it has.
        replicas: u32,
        /// How many have to acknowledge.
        wanted: u32,
    },
    /// The server does not tell this setting: `CONFIG` is forbidden, as by most providers.
    NotTold {
        /// The setting's name.
        setting: &'static str,
    },
}

impl Finding {
    /// Whether it loses live records while all is well, under memory pressure, and not only in a crash or a failover.
    #[must_use]
    pub fn evicts(&self) -> bool {
        matches!(self, Self::Evicts { .. })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Evicts { policy } => {
                write!(f, "it evicts live records under memory pressure (maxmemory-policy {policy})")
            }
            Self::NoPersistence => f.write_str("it keeps nothing on disk (appendonly no, no save points)"),
            Self::SnapshotsOnly => {
                f.write_str("a crash loses what was written since the latest snapshot (appendonly no)")
            }
            Self::NeverSyncs => {
                f.write_str("a crash of the machine loses what the system has not written (appendfsync no)")
            }
            Self::SyncsEverySecond => {
                f.write_str("a crash of the machine loses the last seconds (appendfsync everysec)")
            }
            Self::ReplicasNotAwaited { replicas } => {
                write!(f, "a failover loses what its {replicas} replicas have not received (nothing waits for them)")
            }
            Self::TooFewReplicas { replicas, wanted } => {
                write!(f, "it has {replicas} replicas, and every write waits for {wanted}")
            }
            Self::NotTold { setting } => write!(f, "it does not tell {setting}"),
        }
    }
}

/// The `name:value` lines of `INFO`.
fn info(text: &str) -> HashMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once(':')).map(|(name, value)| (name, value.trim())).collect()
}

fn setup(trouble: Trouble) -> StoreError {
    let class = trouble.classify(false).1;
    trouble.into_error(class, false, Operation::Setup)
}

fn text(value: Value) -> Result<String, StoreError> {
    match value {
        Value::ServerError(error) => Err(setup(Trouble::Server(error))),
        value => redis::from_redis_value(value).map_err(|_| own_error(RedisStoreError::Answer, Operation::Setup)),
    }
}

/// Asks `INFO` with a section; before version 7 it takes one only.
fn ask(section: &str) -> Cmd {
    let mut command = cmd("INFO");
    command.arg(section);
    command
}

/// 6.2 and later; Valkey began with 7.2.
fn is_known(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default()) >= (6, 2)
}

/// Whether the server can be used at all: reachable, new enough, of the kind that it was given as, a master.
pub(crate) async fn check_usable(
    calls: &Calls,
    acknowledge: Acknowledge,
) -> Result<Vec<(Option<String>, String)>, StoreError> {
    let mut servers = Vec::new();
    for (node, value) in calls.link.each_master(&ask("all"), calls.deadline()).await.map_err(setup)? {
        let told = text(value)?;
        let told_of = info(&told);
        let version = told_of.get("redis_version").copied().unwrap_or_default();
        let problem = if !is_known(version) {
            Some(RedisStoreError::ServerTooOld { found: version.to_owned() })
        } else if told_of.get("cluster_enabled") == Some(&"1") && !calls.link.is_cluster() {
            Some(RedisStoreError::IsCluster)
        } else if told_of.get("cluster_enabled") == Some(&"0") && calls.link.is_cluster() {
            Some(RedisStoreError::IsNoCluster)
        } else if told_of.get("role").is_some_and(|role| *role != "master") {
            Some(RedisStoreError::Replica)
        } else if acknowledge.fsync != Fsync::None
            && !(has_waitaof(&told_of) && told_of.get("aof_enabled") == Some(&"1"))
        {
            Some(RedisStoreError::NoWaitAof)
        } else {
            None
        };
        if let Some(problem) = problem {
            return Err(own_error(problem, Operation::Setup));
        }
        servers.push((node, told));
    }
    Ok(servers)
}

fn has_waitaof(info: &HashMap<&str, &str>) -> bool {
    let version = info.get("redis_version").copied().unwrap_or_default();
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
    (parts.next().unwrap_or_default(), parts.next().unwrap_or_default()) >= (7, 2)
}

/// Whether the user may run the scripts and write: a key of no importance is reserved, which is gone a second later.
pub(crate) async fn check_rights(calls: &Calls) -> Result<(), StoreError> {
    let key = Key::new("", "idem-probe").map_err(|input| StoreError::invalid(input, STORE, Operation::Setup))?;
    let request = Reserve::new(key).with_lease(Duration::from_millis(1)).with_retention(Duration::from_millis(1));
    match calls.probe(Call::Reserve(&request)).await {
        Ok(_) => Ok(()),
        // The user may run scripts, and not what is in them: the server has no code of its own for that.
        Err(error) if error.kind() == ErrorKind::Other => {
            Err(StoreError::new(ErrorKind::Misconfigured, STORE, Operation::Setup)
                .with_context("the server refuses what the scripts do")
                .with_source(error))
        }
        // It is full, or a replica does not answer now: that may pass, and each call tells.
        Err(error) if error.class() != ErrorClass::Permanent => Ok(()),
        Err(error) => Err(error),
    }
}

/// What the servers may lose.
pub(crate) async fn report(calls: &Calls, config: &Config) -> Result<Vec<ServerReport>, StoreError> {
    let mut reports = Vec::new();
    for (node, told) in check_usable(calls, config.acknowledge).await? {
        let told = info(&told);
        let mut findings = Vec::new();
        let policy = match told.get("maxmemory_policy") {
            Some(policy) => Some((*policy).to_owned()),
            None => setting(calls, node.as_deref(), "maxmemory-policy").await?,
        };
        match policy {
            None => findings.push(Finding::NotTold { setting: "maxmemory-policy" }),
            Some(policy) if policy != "noeviction" => findings.push(Finding::Evicts { policy }),
            Some(_) => {}
        }
        if told.get("aof_enabled") == Some(&"1") {
            match setting(calls, node.as_deref(), "appendfsync").await?.as_deref() {
                None => findings.push(Finding::NotTold { setting: "appendfsync" }),
                Some("always") => {}
                Some("everysec") if config.acknowledge.fsync == Fsync::None => findings.push(Finding::SyncsEverySecond),
                Some("everysec") => {}
                Some(_) => findings.push(Finding::NeverSyncs),
            }
        } else {
            match setting(calls, node.as_deref(), "save").await?.as_deref() {
                None => findings.push(Finding::NotTold { setting: "save" }),
                Some("") => findings.push(Finding::NoPersistence),
                Some(_) => findings.push(Finding::SnapshotsOnly),
            }
        }
        let replicas = told.get("connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
        let wanted = config.acknowledge.replicas;
        if replicas > 0 && wanted == 0 {
            findings.push(Finding::ReplicasNotAwaited { replicas });
        } else if replicas < wanted {
            findings.push(Finding::TooFewReplicas { replicas, wanted });
        }
        findings.sort();
        let valkey = told.get("server_name") == Some(&"valkey");
        let version = if valkey { "valkey_version" } else { "redis_version" };
        let version = told.get(version).copied().unwrap_or_default().to_owned();
        reports.push(ServerReport { node, valkey, version, findings });
    }
    reports.sort_by(|a, b| a.node.cmp(&b.node));
    Ok(reports)
}

/// A setting, if the server tells it.
async fn setting(calls: &Calls, node: Option<&str>, name: &str) -> Result<Option<String>, StoreError> {
    let mut command = cmd("CONFIG");
    command.arg("GET").arg(name);
    match calls.link.to_node(node, &command, calls.deadline()).await.map_err(setup)? {
        // Forbidden, or renamed.
        Value::ServerError(_) => Ok(None),
        value => {
            let pairs: HashMap<String, String> = redis::from_redis_value(value).unwrap_or_default();
            Ok(pairs.get(name).cloned())
        }
    }
}

/// Applies the policies to what was found.
pub(crate) fn judge(reports: &[ServerReport], config: &Config) -> Result<(), StoreError> {
    let mut refused = Vec::new();
    for report in reports {
        for finding in &report.findings {
            let policy = if finding.evicts() { config.on_eviction } else { config.on_data_loss };
            match policy {
                Policy::Ignore => {}
                Policy::Warn => warn!(node = report.node, "the Redis server may lose records: {finding}"),
                Policy::Refuse => refused.push(finding.clone()),
            }
        }
    }
    refused.sort();
    refused.dedup();
    if refused.is_empty() { Ok(()) } else { Err(own_error(RedisStoreError::Unsafe(refused), Operation::Setup)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for version in ["6.2.0", "6.2.14", "6.10.1", "7.0.15", "8.0", "10.1.0"] {
            assert!(is_known(version), "{version}");
        }
        for version in ["6.0.16", "5.0.14", "2.8", "", "x"] {
            assert!(!is_known(version), "{version}");
        }
    }
}
