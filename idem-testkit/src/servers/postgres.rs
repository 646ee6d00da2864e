//! A private Postgres.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{free_port, stop_after_this_process};

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
            return Ok(found);
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
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let programs = Self::find()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("idem-postgres-{}-{number}", std::process::id()));
        fs::create_dir_all(&directory)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
        let user = if is_root()? { Some(ids_of("postgres")?) } else { None };
        if let Some((uid, gid)) = user {
            chown(&directory, Some(uid), Some(gid))?;
        }
        let server = Self { directory, programs, port: free_port()?, user };
        let data = server.data();
        server.run(
            "initdb",
            &["-D", &data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale", "C", "--no-sync"],
        )?;
        let mut configuration = format!(
            "listen_addresses = '127.0.0.1'\nport = {}\nunix_socket_directories = '{}'\nmax_connections = 200\n\
             shared_buffers = '256MB'\nmax_wal_size = '4GB'\nlogging_collector = off\n",
            server.port,
            server.directory.display()
        );
        for (name, value) in settings {
            configuration.push_str(&format!("{name} = '{}'\n", value.replace('\'', "''")));
        }
        let file = Path::new(&data).join("postgresql.conf");
        let before = fs::read_to_string(&file)?;
        fs::write(&file, before + &configuration)?;
        let stop = format!("kill -QUIT $(head -n 1 '{data}/postmaster.pid')");
        stop_after_this_process(&stop, &server.directory)?;
        server.up()?;
        Ok(server)
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

    /// Kills the postmaster and all its processes at once.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn crash(&self) -> io::Result<()> {
        let file = fs::read_to_string(Path::new(&self.data()).join("postmaster.pid"))?;
        let pid = file.lines().next().unwrap_or_default().trim().to_owned();
        succeed(Command::new("kill").args(["-9", &pid]).output()?)?;
        // Its children notice, and end; until then, their shared memory keeps a successor out.
        let end = Instant::now() + Duration::from_secs(20);
        while Path::new("/proc").join(&pid).exists() && Instant::now() < end {
            sleep(Duration::from_millis(10));
        }
        Ok(())
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
        command.args(arguments).current_dir(&self.directory).env_remove("LC_ALL").stdin(Stdio::null());
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

fn succeed(output: Output) -> io::Result<Output> {
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{}: {}", output.status, said.trim())))
}

fn is_root() -> io::Result<bool> {
    let output = succeed(Command::new("id").arg("-u").output()?)?;
    Ok(output.stdout.trim_ascii() == b"0")
}

fn ids_of(user: &str) -> io::Result<(u32, u32)> {
    let number = |flag: &str| -> io::Result<u32> {
        let output = succeed(Command::new("id").args([flag, user]).output()?)?;
        String::from_utf8_lossy(&output.stdout).trim().parse().map_err(io::Error::other)
    };
    Ok((number("-u")?, number("-g")?))
}
