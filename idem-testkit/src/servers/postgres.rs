//! A private Postgres.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{free_port, own_directory, stop_after_this_process, succeed};

/// A Postgres server of the test's own, with `fsync` and `synchronous_commit` on, as they are by default.
///
/// Started as the user `postgres` where the test runs as root, which Postgres refuses to run as.
#[derive(Debug)]
pub struct PostgresServer {
    directory: PathBuf,
    programs: PathBuf,
    port: u16,
    user: Option<(u32, u32)>,
}

impl PostgresServer {
    /// Where the server's programs are: on the `PATH`, or where Debian and others put the newest version.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn find() -> io::Result<PathBuf> {
        let complete = |directory: &PathBuf| ["initdb", "pg_ctl"].iter().all(|name| directory.join(name).is_file());
        let path = std::env::var_os("PATH").unwrap_or_default();
        if let Some(found) = std::env::split_paths(&path).find(complete) {
            // Often links to some of the programs, which lie together elsewhere.
            let real = fs::canonicalize(found.join("pg_ctl"))?;
            return Ok(real.parent().map(Path::to_owned).filter(complete).unwrap_or(found));
        }
        let mut versions: Vec<(u32, PathBuf)> = ["/usr/lib/postgresql", "/usr/pgsql"]
            .iter()
            .filter_map(|place| fs::read_dir(place).ok())
            .flatten()
            .flatten()
            .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
            .filter(|(_, directory)| complete(directory))
            .collect();
        versions.sort();
        versions.pop().map(|(_, directory)| directory).ok_or_else(|| {
            io::Error::new(ErrorKind::NotFound, "no initdb and pg_ctl, neither on the PATH nor in /usr/lib/postgresql")
        })
    }

    /// Makes a cluster and starts its server, with these settings beside the default ones.
    ///
    /// # Errors
    /// When the programs are not there or fail; the message has what they said.
    pub fn start(settings: &[(&str, &str)]) -> io::Result<Self> {
        let server = Self::prepare()?;
        let data = server.data();
        server.run(
            "initdb",
            &["-D", &data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale", "C", "--no-sync"],
        )?;
        server.configure(settings)?;
        server.up()?;
        Ok(server)
    }

    /// Starts a standby that follows this server by streaming replication, and answers reads meanwhile.
    ///
    /// # Errors
    /// When the programs are not there or fail; the message has what they said.
    pub fn start_standby(&self, settings: &[(&str, &str)]) -> io::Result<Self> {
        let server = Self::prepare()?;
        let (data, primary) = (server.data(), format!("host=127.0.0.1 port={} user=postgres", self.port));
        server.run("pg_basebackup", &["-d", &primary, "-D", &data, "-R", "-X", "stream", "-c", "fast", "--no-sync"])?;
        server.configure(settings)?;
        server.up()?;
        Ok(server)
    }

    /// Makes a standby the primary, and waits until it is.
    ///
    /// # Errors
    /// When it is none.
    pub fn promote(&self) -> io::Result<()> {
        self.run("pg_ctl", &["promote", "-w", "-s", "-t", "60", "-D", &self.data()]).map(drop)
    }

    /// A server that has a directory and a port, and no cluster yet.
    fn prepare() -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let programs = Self::find()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("idem-postgres-{}-{number}", std::process::id()));
        let user = own_directory(&directory, "postgres")?;
        Ok(Self { directory, programs, port: free_port()?, user })
    }

    fn configure(&self, settings: &[(&str, &str)]) -> io::Result<()> {
        let data = self.data();
        let mut configuration = format!(
            "listen_addresses = '127.0.0.1'\nport = {}\nunix_socket_directories = '{}'\nmax_connections = 200\n\
             shared_buffers = '256MB'\nmax_wal_size = '4GB'\nlogging_collector = off\n",
            self.port,
            self.directory.display()
        );
        for (name, value) in settings {
            configuration.push_str(&format!("{name} = '{}'\n", value.replace('\'', "''")));
        }
        // The last line of a name counts.
        let file = Path::new(&data).join("postgresql.conf");
        let before = fs::read_to_string(&file)?;
        fs::write(&file, before + &configuration)?;
        let stop = format!("kill -QUIT $(head -n 1 '{data}/postmaster.pid')");
        stop_after_this_process(&stop, &self.directory)
    }

    /// The URL of its database `postgres`, for its superuser.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// The port on the loopback interface.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// A directory of the server's own, for files beside it.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Kills the postmaster as a crash of the machine would, and starts the server again, which recovers from its log.
    ///
    /// # Errors
    /// When the server cannot be killed or started.
    pub fn crash_and_restart(&self) -> io::Result<()> {
        self.crash()?;
        self.up()
    }

    /// Kills the postmaster and all its processes at once, as a power cut would, but for what the system holds in memory.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn crash(&self) -> io::Result<()> {
        let file = Path::new(&self.data()).join("postmaster.pid");
        let pid = fs::read_to_string(&file)?.lines().next().unwrap_or_default().trim().to_owned();
        // It must not start another while its processes are listed.
        succeed(Command::new("kill").args(["-STOP", &pid]).output()?)?;
        let mut all = children(&pid)?;
        all.insert(0, pid);
        // Some may have ended meanwhile.
        Command::new("kill").arg("-9").args(&all).output()?;
        let end = Instant::now() + Duration::from_secs(20);
        while all.iter().any(|pid| alive(pid)) {
            if Instant::now() > end {
                return Err(io::Error::other("the server's processes do not end"));
            }
            sleep(Duration::from_millis(5));
        }
        // All have ended. These would keep a successor out until the system has cleared the postmaster away.
        fs::remove_file(self.directory.join(format!(".s.PGSQL.{}.lock", self.port)))?;
        fs::remove_file(file)
    }

    /// Starts the server.
    ///
    /// # Errors
    /// When it does not start in a minute.
    pub fn up(&self) -> io::Result<()> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let log = self.directory.join("log").display().to_string();
            match self.run("pg_ctl", &["start", "-w", "-s", "-t", "60", "-D", &self.data(), "-l", &log]) {
                Err(_) if Instant::now() < end => sleep(Duration::from_millis(100)),
                result => return result.map(drop),
            }
        }
    }

    fn data(&self) -> String {
        self.directory.join("data").display().to_string()
    }

    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<Output> {
        let mut command = Command::new(self.programs.join(program));
        command
            .args(arguments)
            .current_dir(&self.directory)
            .env_remove("LC_ALL")
            .env_remove("LANGUAGE")
            .stdin(Stdio::null());
        if program == "pg_ctl" {
            // The server would hold pipes of the test open.
            command.stdout(Stdio::null()).stderr(Stdio::null());
        }
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        succeed(command.output()?)
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // A test that has failed must not fail once more here.
        let _ = self.run("pg_ctl", &["stop", "-s", "-m", "immediate", "-D", &self.data()]);
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// The state and the parent of a process, of `/proc`.
fn stat(pid: &str) -> Option<(String, String)> {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat")).ok()?;
    // Behind the program's name, which may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned);
    Some((fields.next()?, fields.next()?))
}

fn children(parent: &str) -> io::Result<Vec<String>> {
    let names = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|pid| stat(pid).is_some_and(|(_, of)| of == parent)).collect())
}

/// Whether it runs still: one that has ended may be listed for a while.
fn alive(pid: &str) -> bool {
    stat(pid).is_some_and(|(state, _)| state != "Z" && state != "X")
}
