//! Private Redis or Valkey servers: one, a cluster, and a master with a replica and a sentinel.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::stop_after_this_process;

/// A Redis or Valkey server of the test's own: without persistence unless its settings say otherwise.
#[derive(Debug)]
pub struct RedisServer {
    directory: PathBuf,
    port: u16,
    child: Mutex<Option<Child>>,
    /// Also read as arguments when it is started: `--sentinel`.
    sentinel: bool,
}

/// What a server has answered to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Nothing.
    Nil,
    /// A status, or bytes that are text.
    Text(String),
    /// A number.
    Number(i64),
    /// Several.
    List(Vec<Reply>),
    /// An error.
    Error(String),
}

impl Reply {
    /// The text, or nothing.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Error(text) => text,
            Self::Nil | Self::Number(_) | Self::List(_) => "",
        }
    }
}

impl RedisServer {
    /// The server's program: the one that `IDEM_REDIS_SERVER` names, or `redis-server` or `valkey-server` on the `PATH`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn find() -> io::Result<PathBuf> {
        if let Some(program) = std::env::var_os("IDEM_REDIS_SERVER") {
            return Ok(program.into());
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = ["redis-server", "valkey-server"]
            .iter()
            .flat_map(|name| std::env::split_paths(&path).map(move |directory| directory.join(name)))
            .find(|program| program.is_file());
        found
            .ok_or_else(|| io::Error::new(ErrorKind::NotFound, "neither redis-server nor valkey-server is on the PATH"))
    }

    /// Starts a server with these settings beside the default ones.
    ///
    /// # Errors
    /// When the program is not there or does not start; the message has what it said.
    pub fn start(settings: &[(&str, &str)]) -> io::Result<Self> {
        Self::start_as(settings, false)
    }

    fn start_as(settings: &[(&str, &str)], sentinel: bool) -> io::Result<Self> {
        let mut failed = None;
        // A port that was free a moment ago may be taken when the server asks for it.
        for _ in 0..5 {
            match Self::try_start(settings, sentinel) {
                Ok(server) => return Ok(server),
                Err(error) if error.kind() == ErrorKind::NotFound => return Err(error),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| io::Error::other("it does not start")))
    }

    fn try_start(settings: &[(&str, &str)], sentinel: bool) -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let program = Self::find()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("idem-redis-{}-{number}", std::process::id()));
        fs::create_dir_all(&directory)?;
        let port = free_port()?;
        let mut file =
            format!("port {port}\nbind 127.0.0.1\ndir {}\npidfile {0}/pid\nlogfile {0}/log\n", directory.display());
        if !sentinel {
            // A replica's first copy is sent at once.
            file.push_str("save \"\"\nrepl-diskless-sync-delay 0\n");
            // Version 7 and later forbid it otherwise.
            if major(&program)? >= 7 {
                file.push_str("enable-debug-command yes\n");
            }
        }
        for (name, value) in settings {
            let value = if value.is_empty() { "\"\"" } else { value };
            // Writing to a string does not fail.
            let _ = writeln!(file, "{name} {value}");
        }
        fs::write(directory.join("conf"), file)?;
        stop_after_this_process(&format!("kill -9 $(cat '{}/pid')", directory.display()), &directory)?;
        let server = Self { directory, port, child: Mutex::default(), sentinel };
        server.up()?;
        Ok(server)
    }

    /// The URL of its database 0.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port on the loopback interface.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The server's directory, for files beside it.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Sends a command and waits for the answer, on a connection of its own.
    ///
    /// # Errors
    /// When the server cannot be reached. An error that it answers with is a [`Reply::Error`].
    pub fn command(&self, words: &[&str]) -> io::Result<Reply> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let mut message = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            message.extend(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
        }
        stream.write_all(&message)?;
        read_reply(&mut BufReader::new(stream))
    }

    /// As [`command`](Self::command), and an error that the server answers with is one.
    ///
    /// # Errors
    /// When the server cannot be reached or answers with an error.
    pub fn must(&self, words: &[&str]) -> io::Result<Reply> {
        match self.command(words)? {
            Reply::Error(error) => Err(io::Error::other(format!("{words:?}: {error}"))),
            reply => Ok(reply),
        }
    }

    /// Kills the server as a crash of its process would, and starts it again on what it has written to its disk.
    ///
    /// # Errors
    /// When it cannot be killed or started.
    pub fn crash_and_restart(&self) -> io::Result<()> {
        self.crash()?;
        self.up()
    }

    /// Kills the server at once.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn crash(&self) -> io::Result<()> {
        let child = self.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut child) = child {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Starts the server.
    ///
    /// # Errors
    /// When it does not answer in half a minute; the message has the end of its log.
    pub fn up(&self) -> io::Result<()> {
        let mut command = Command::new(Self::find()?);
        command.arg(self.directory.join("conf")).current_dir(&self.directory);
        if self.sentinel {
            command.arg("--sentinel");
        }
        // In a group of its own, so that it is not interrupted with the test before that has ended.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(status) = child.try_wait()? {
                return Err(io::Error::other(format!("{status}: {}", self.end_of_log())));
            }
            // One that wants a password is there as well.
            let answered = self.command(&["PING"]).unwrap_or(Reply::Nil);
            if answered.text() == "PONG" || answered.text().starts_with("NOAUTH") {
                *self.child.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
                return Ok(());
            }
            if Instant::now() > end {
                child.kill()?;
                child.wait()?;
                return Err(io::Error::new(ErrorKind::TimedOut, self.end_of_log()));
            }
            sleep(Duration::from_millis(5));
        }
    }

    fn end_of_log(&self) -> String {
        let log = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("\n")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // A test that has failed must not fail once more here.
        let _ = self.crash();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A port that was free a moment ago, as was the one of a cluster's bus, 10,000 above.
fn free_port() -> io::Result<u16> {
    for _ in 0..1_000 {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let port = if port > 50_000 { port - 20_000 } else { port };
        let free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if free(port) && free(port + 10_000) {
            return Ok(port);
        }
    }
    Err(io::Error::new(ErrorKind::AddrInUse, "no free ports"))
}

/// The major version of that program.
fn major(program: &Path) -> io::Result<u32> {
    let output = Command::new(program).arg("--version").output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_once("v=").map_or("", |(_, rest)| rest);
    version.split('.').next().and_then(|major| major.parse().ok()).ok_or_else(|| io::Error::other(text.clone()))
}

fn read_reply(input: &mut impl BufRead) -> io::Result<Reply> {
    let mut line = String::new();
    if input.read_line(&mut line)? == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let line = line.trim_end();
    let (kind, rest) = line.split_at_checked(1).ok_or(ErrorKind::InvalidData)?;
    let number = || rest.parse::<i64>().map_err(io::Error::other);
    Ok(match kind {
        "+" => Reply::Text(rest.to_owned()),
        "-" => Reply::Error(rest.to_owned()),
        ":" => Reply::Number(number()?),
        "$" => match usize::try_from(number()?) {
            Err(_) => Reply::Nil,
            Ok(length) => {
                let mut bytes = vec![0; length + 2];
                input.read_exact(&mut bytes)?;
                bytes.truncate(length);
                Reply::Text(String::from_utf8_lossy(&bytes).into_owned())
            }
        },
        "*" => match number()? {
            count if count < 0 => Reply::Nil,
            count => Reply::List((0..count).map(|_| read_reply(input)).collect::<io::Result<_>>()?),
        },
        _ => return Err(ErrorKind::InvalidData.into()),
    })
}

/// Looks again and again whether something has come about.
fn until(what: &str, patience: Duration, mut done: impl FnMut() -> io::Result<bool>) -> io::Result<()> {
    let end = Instant::now() + patience;
    loop {
        if done().unwrap_or(false) {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(io::Error::new(ErrorKind::TimedOut, format!("not in {patience:?}: {what}")));
        }
        sleep(Duration::from_millis(20));
    }
}

/// A cluster of three masters with a replica each.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    ids: Vec<String>,
}

/// Slots of a cluster.
const SLOTS: u16 = 16_384;
const MASTERS: u16 = 3;

impl RedisCluster {
    /// Starts six nodes with these settings, and makes a cluster of them.
    ///
    /// # Errors
    /// When a node does not start or the cluster does not come about in half a minute.
    pub fn start(settings: &[(&str, &str)]) -> io::Result<Self> {
        let own = [("cluster-enabled", "yes"), ("cluster-config-file", "nodes.conf"), ("cluster-node-timeout", "2000")];
        let settings: Vec<_> = own.into_iter().chain(settings.iter().copied()).collect();
        let nodes = (0..2 * MASTERS).map(|_| RedisServer::start(&settings)).collect::<io::Result<Vec<_>>>()?;
        let id = |node: &RedisServer| Ok(node.must(&["CLUSTER", "MYID"])?.text().to_owned());
        let ids = nodes.iter().map(id).collect::<io::Result<Vec<_>>>()?;
        for (at, master) in (0..MASTERS).zip(&nodes) {
            let from = |at: u16| u32::from(at) * u32::from(SLOTS) / u32::from(MASTERS);
            let slots: Vec<String> = (from(at)..from(at + 1)).map(|slot| slot.to_string()).collect();
            let words: Vec<&str> =
                ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
            master.must(&words)?;
            // Epochs of their own, so that no two masters have to find out who gives way.
            master.must(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()])?;
        }
        let cluster = Self { nodes, ids };
        let first = cluster.nodes[0].port.to_string();
        for node in &cluster.nodes[1..] {
            node.must(&["CLUSTER", "MEET", "127.0.0.1", &first])?;
        }
        let patience = Duration::from_secs(30);
        for (replica, master) in cluster.nodes[usize::from(MASTERS)..].iter().zip(&cluster.ids) {
            until("a replica finds its master", patience, || {
                replica.must(&["CLUSTER", "REPLICATE", master]).map(|_| true)
            })?;
        }
        for (at, node) in cluster.nodes.iter().enumerate() {
            until("the cluster is complete", patience, || {
                let told = node.must(&["CLUSTER", "INFO"])?;
                let known = node.must(&["CLUSTER", "SLOTS"])?;
                let whole = matches!(&known, Reply::List(ranges) if ranges.len() == usize::from(MASTERS)
                    && ranges.iter().all(|range| matches!(range, Reply::List(parts) if parts.len() == 4)));
                let synced = at < usize::from(MASTERS)
                    || node.must(&["INFO", "replication"])?.text().contains("master_link_status:up");
                Ok(told.text().contains("cluster_state:ok") && whole && synced)
            })?;
        }
        Ok(cluster)
    }

    /// The nodes: the masters, and then their replicas in the same order.
    #[must_use]
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The masters that the cluster began with.
    #[must_use]
    pub fn masters(&self) -> &[RedisServer] {
        &self.nodes[..usize::from(MASTERS)]
    }

    /// The URLs of the nodes.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisServer::url).collect()
    }

    /// Moves a slot with all its keys from one of the masters (by its place) to another, key by key, as `redis-cli
    /// --cluster reshard` does. A slot that another master has is left there.
    ///
    /// # Errors
    /// When a node refuses a step.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) -> io::Result<()> {
        let (source, target, slot) = (&self.nodes[from], &self.nodes[to], slot.to_string());
        target.must(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.ids[from]])?;
        source.must(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.ids[to]])?;
        loop {
            let Reply::List(keys) = source.must(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"])? else {
                return Err(ErrorKind::InvalidData.into());
            };
            if keys.is_empty() {
                break;
            }
            let port = target.port.to_string();
            for key in &keys {
                // NOKEY where it has expired meanwhile.
                source.must(&["MIGRATE", "127.0.0.1", &port, key.text(), "0", "5000"])?;
            }
        }
        for node in [target, source] {
            node.must(&["CLUSTER", "SETSLOT", &slot, "NODE", &self.ids[to]])?;
        }
        Ok(())
    }
}

/// A master with a replica, and a sentinel that looks after them.
#[derive(Debug)]
pub struct RedisFailover {
    servers: [RedisServer; 2],
    sentinel: RedisServer,
}

impl RedisFailover {
    /// The master's name, as the sentinel knows it.
    pub const MASTER: &'static str = "idem";

    /// Starts the three, with these settings for master and replica.
    ///
    /// # Errors
    /// When one does not start, or they do not find each other in half a minute.
    pub fn start(settings: &[(&str, &str)]) -> io::Result<Self> {
        let master = RedisServer::start(settings)?;
        let port = master.port.to_string();
        let of_master = format!("127.0.0.1 {port}");
        let settings: Vec<_> = [("replicaof", &*of_master)].into_iter().chain(settings.iter().copied()).collect();
        let replica = RedisServer::start(&settings)?;
        let monitored = format!("monitor {} {of_master} 1", Self::MASTER);
        // Long enough that a busy machine does not look like a dead one.
        let down = format!("down-after-milliseconds {} 1500", Self::MASTER);
        let timeout = format!("failover-timeout {} 3000", Self::MASTER);
        let sentinel =
            RedisServer::start_as(&[("sentinel", &monitored), ("sentinel", &down), ("sentinel", &timeout)], true)?;
        let this = Self { servers: [master, replica], sentinel };
        // Where it can be told to (version 7 and later), it looks around more often, and a failover takes less time.
        this.sentinel.command(&[
            "SENTINEL",
            "DEBUG",
            "INFO-PERIOD",
            "200",
            "PING-PERIOD",
            "500",
            "ASK-PERIOD",
            "100",
            "PUBLISH-PERIOD",
            "200",
            "MIN-LINK-RECONNECT-PERIOD",
            "200",
            "ELECTION-TIMEOUT",
            "500",
        ])?;
        until("the sentinel knows the replica, which is in sync", Duration::from_secs(30), || {
            let told = this.sentinel.must(&["INFO", "sentinel"])?;
            let synced = this.servers[1].must(&["INFO", "replication"])?;
            let online = this.servers[0].must(&["WAIT", "1", "100"])? == Reply::Number(1);
            Ok(told.text().contains("slaves=1") && synced.text().contains("master_link_status:up") && online)
        })?;
        Ok(this)
    }

    /// The sentinel's URL.
    #[must_use]
    pub fn sentinel_url(&self) -> String {
        self.sentinel.url()
    }

    /// The two servers: the master that it began with, and the replica.
    #[must_use]
    pub fn servers(&self) -> &[RedisServer; 2] {
        &self.servers
    }

    /// Which of [`servers`](Self::servers) the sentinel takes for the master now.
    ///
    /// # Errors
    /// When the sentinel does not tell.
    pub fn master(&self) -> io::Result<usize> {
        let told = self.sentinel.must(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::MASTER])?;
        let Reply::List(parts) = told else { return Err(ErrorKind::InvalidData.into()) };
        let port = parts.get(1).map(|part| part.text().to_owned()).unwrap_or_default();
        self.servers.iter().position(|server| server.port.to_string() == port).ok_or(ErrorKind::NotFound.into())
    }

    /// Lets the sentinel exchange the roles of the two, both of which live on, and waits until that is done. Sooner done than
    /// [`fail_over`](Self::fail_over).
    ///
    /// # Errors
    /// When that does not come about in half a minute.
    pub fn switch(&self) -> io::Result<()> {
        let old = self.master()?;
        let patience = Duration::from_secs(30);
        let mut asked: Option<Instant> = None;
        until("the roles are exchanged", patience, || {
            if self.master()? == old {
                // It refuses for a moment just after another one, and gives up where the replica did not look well.
                if asked.is_none_or(|at| at.elapsed() > Duration::from_secs(5)) {
                    self.sentinel.must(&["SENTINEL", "FAILOVER", Self::MASTER])?;
                    asked = Some(Instant::now());
                }
                return Ok(false);
            }
            Ok(self.servers[old].must(&["INFO", "replication"])?.text().contains("master_link_status:up"))
        })
    }

    /// Kills the master, and waits until the sentinel has made the replica the master.
    ///
    /// # Errors
    /// When that does not come about in half a minute.
    pub fn fail_over(&self) -> io::Result<()> {
        let old = self.master()?;
        self.servers[old].crash()?;
        until("the sentinel has made the replica the master", Duration::from_secs(30), || {
            let role = self.servers[1 - old].must(&["ROLE"])?;
            Ok(matches!(role, Reply::List(parts) if parts.first().is_some_and(|role| role.text() == "master"))
                && self.master()? != old)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_of_every_form_are_read() {
        let mut input = &b"*4\r\n:-3\r\n$4\r\na\r\nb\r\n$-1\r\n-ERR no\r\n"[..];
        let expected = Reply::List(vec![
            Reply::Number(-3),
            Reply::Text("a\r\nb".to_owned()),
            Reply::Nil,
            Reply::Error("ERR no".to_owned()),
        ]);
        assert_eq!(read_reply(&mut input).unwrap(), expected);
        assert!(input.is_empty() && read_reply(&mut input).is_err());
    }
}
