//! A private FoundationDB cluster.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{free_port, stop_after_this_process, succeed};

/// A FoundationDB cluster of the test's own, with the engine `memory`, which keeps a log on the disk.
#[derive(Debug)]
pub struct FdbCluster {
    directory: PathBuf,
    programs: FdbPrograms,
    processes: Vec<Process>,
}

/// Where the programs of FoundationDB's server are.
#[derive(Debug, Clone)]
pub struct FdbPrograms {
    server: PathBuf,
    cli: PathBuf,
}

#[derive(Debug)]
struct Process {
    /// Where clients and other processes find it.
    public: u16,
    /// Where it listens.
    listen: u16,
    child: Mutex<Option<Child>>,
}

impl FdbCluster {
    /// The programs `fdbserver` and `fdbcli`: in the directory that `IDEM_FDB_PROGRAMS` names, on the `PATH`, or where the
    /// official packages put them.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn find() -> io::Result<FdbPrograms> {
        let named = std::env::var_os("IDEM_FDB_PROGRAMS").map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let usual = ["/usr/sbin", "/usr/bin", "/usr/local/libexec", "/usr/local/bin"].map(PathBuf::from);
        let places: Vec<PathBuf> = named.into_iter().chain(std::env::split_paths(&path)).chain(usual).collect();
        let find = |name: &str| {
            places.iter().map(|place| place.join(name)).find(|program| program.is_file()).ok_or_else(|| {
                let said = format!("no {name}, neither in IDEM_FDB_PROGRAMS nor on the PATH nor in /usr/sbin");
                io::Error::new(ErrorKind::NotFound, said)
            })
        };
        Ok(FdbPrograms { server: find("fdbserver")?, cli: find("fdbcli")? })
    }

    /// Starts a cluster of one process.
    ///
    /// # Errors
    /// When the programs are not there, or the cluster is not available in a minute.
    pub fn start() -> io::Result<Self> {
        let port = free_port()?;
        Self::start_with(&[(port, port)], "single")
    }

    /// Starts a cluster of one process that clients reach at another port: that of a proxy of the test's. It is up although
    /// the proxy is not.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_behind(proxy: u16) -> io::Result<Self> {
        Self::start_with(&[(proxy, free_port()?)], "single")
    }

    /// Starts a cluster of so many processes, with two copies of everything, so that any one of them may die. Three at least,
    /// all of which are coordinators.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_double(processes: usize) -> io::Result<Self> {
        let ports: Vec<u16> = (0..processes.max(3)).map(|_| free_port()).collect::<io::Result<_>>()?;
        Self::start_with(&ports.into_iter().map(|port| (port, port)).collect::<Vec<_>>(), "double")
    }

    fn start_with(ports: &[(u16, u16)], redundancy: &str) -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let programs = Self::find()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("idem-fdb-{}-{number}", std::process::id()));
        fs::create_dir_all(&directory)?;
        let stop = format!("cat '{}'/*.pid | xargs -r kill -9", directory.display());
        stop_after_this_process(&stop, &directory)?;
        let coordinators: Vec<String> = ports.iter().map(|(public, _)| format!("127.0.0.1:{public}")).collect();
        let processes =
            ports.iter().map(|&(public, listen)| Process { public, listen, child: Mutex::default() }).collect();
        let cluster = Self { directory, programs, processes };
        fs::write(cluster.cluster_file(), format!("idem:kit@{}\n", coordinators.join(",")))?;
        for number in 0..cluster.processes.len() {
            cluster.up(number)?;
        }
        // The clients of a proxy of the test's wait for the test: the programs here must not.
        if ports.iter().all(|(public, listen)| public == listen) {
            cluster.configure(redundancy)?;
        }
        Ok(cluster)
    }

    /// Makes the database, and waits until it is available. [`start`](Self::start) and
    /// [`start_double`](Self::start_double) do so; behind a proxy it is to be called once the proxy is up.
    ///
    /// # Errors
    /// When that does not come about in a minute.
    pub fn configure(&self, redundancy: &str) -> io::Result<()> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let said = self.cli(&format!("configure new {redundancy} memory"));
            // It is there already where an earlier command was not answered in time.
            match said {
                Ok(said) if said.contains("created") => break,
                Ok(said) if said.contains("already exists") => break,
                said if Instant::now() > end => return Err(io::Error::other(format!("configure: {said:?}"))),
                _ => sleep(Duration::from_millis(100)),
            }
        }
        self.wait()
    }

    /// Waits until the database is available.
    ///
    /// # Errors
    /// When it is not in a minute.
    pub fn wait(&self) -> io::Result<()> {
        let end = Instant::now() + Duration::from_secs(60);
        while !self.cli("status minimal").is_ok_and(|said| said.contains("is available")) {
            if Instant::now() > end {
                return Err(io::Error::new(ErrorKind::TimedOut, "the database does not become available"));
            }
            sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// The cluster file, by which clients find it.
    #[must_use]
    pub fn cluster_file(&self) -> PathBuf {
        self.directory.join("fdb.cluster")
    }

    /// The port that the first process listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.processes.first().map_or(0, |process| process.listen)
    }

    /// How many processes it has.
    #[must_use]
    pub fn processes(&self) -> usize {
        self.processes.len()
    }

    /// What `fdbcli` says to a command.
    ///
    /// # Errors
    /// When it fails, or has no answer in ten seconds.
    pub fn cli(&self, command: &str) -> io::Result<String> {
        let output = Command::new(&self.programs.cli)
            .arg("-C")
            .arg(self.cluster_file())
            .args(["--timeout", "10", "--exec", command])
            .stdin(Stdio::null())
            .output()?;
        Ok(String::from_utf8_lossy(&succeed(output)?.stdout).into_owned())
    }

    /// Kills a process with `kill -9`.
    ///
    /// # Errors
    /// When it does not run.
    pub fn crash(&self, number: usize) -> io::Result<()> {
        let child = self.process(number)?.child.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut child = child.ok_or_else(|| io::Error::other("the process does not run"))?;
        child.kill()?;
        child.wait().map(drop)
    }

    /// Starts a process that was killed, on its data. Does not wait for the database.
    ///
    /// # Errors
    /// When it does not start.
    pub fn up(&self, number: usize) -> io::Result<()> {
        let process = self.process(number)?;
        let data = self.directory.join(format!("data-{number}"));
        let logs = self.directory.join(format!("logs-{number}"));
        fs::create_dir_all(&data)?;
        fs::create_dir_all(&logs)?;
        let child = Command::new(&self.programs.server)
            .arg("-C")
            .arg(self.cluster_file())
            .args(["-p", &format!("127.0.0.1:{}", process.public)])
            .args(["-l", &format!("127.0.0.1:{}", process.listen)])
            // Each a machine of its own: copies lie on different ones.
            .args(["-i", &format!("machine-{number}"), "-d"])
            .arg(&data)
            .arg("-L")
            .arg(&logs)
            // Works on every file system, also on one in memory.
            .arg("--knob_disable_posix_kernel_aio=1")
            .current_dir(&self.directory)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        fs::write(self.directory.join(format!("{number}.pid")), format!("{}\n", child.id()))?;
        *process.child.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
        Ok(())
    }

    /// The id of a process.
    ///
    /// # Errors
    /// When it does not run.
    pub fn pid(&self, number: usize) -> io::Result<u32> {
        let child = self.process(number)?.child.lock().unwrap_or_else(PoisonError::into_inner);
        child.as_ref().map(Child::id).ok_or_else(|| io::Error::other("the process does not run"))
    }

    /// The cluster's directory, for files beside it.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn process(&self, number: usize) -> io::Result<&Process> {
        self.processes.get(number).ok_or_else(|| io::Error::new(ErrorKind::NotFound, "there is no such process"))
    }
}

impl Drop for FdbCluster {
    fn drop(&mut self) {
        for number in 0..self.processes.len() {
            // One that does not run is where it should be.
            drop(self.crash(number));
        }
        drop(fs::remove_dir_all(&self.directory));
    }
}
