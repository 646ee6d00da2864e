//! A private pgbouncer.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::{PostgresServer, free_port, own_directory, stop_after_this_process};

/// A pgbouncer of the test's own in front of a [`PostgresServer`], in transaction mode: a server connection is a client's
/// for the length of a transaction, and another's after it.
///
/// Started as the user `postgres` where the test runs as root, which pgbouncer refuses to run as.
#[derive(Debug)]
pub struct PgBouncer {
    directory: PathBuf,
    program: PathBuf,
    port: u16,
    user: Option<(u32, u32)>,
    process: Mutex<Option<Child>>,
}

impl PgBouncer {
    /// Where the program is: on the `PATH`, or where Debian puts it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn find() -> io::Result<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
        let mut programs = places.map(|place| place.join("pgbouncer"));
        programs
            .find(|program| program.is_file())
            .ok_or_else(|| io::Error::new(ErrorKind::NotFound, "no pgbouncer, neither on the PATH nor in /usr/sbin"))
    }

    /// Starts one in front of the server, with so many connections to it, for the user `postgres`; with these settings
    /// beside the default ones. Few connections to the server make many clients share them.
    ///
    /// # Errors
    /// When the program is not there or does not start; the message has what it said.
    pub fn start(server: &PostgresServer, pool_size: u32, settings: &[(&str, &str)]) -> io::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let program = Self::find()?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("idem-pgbouncer-{}-{number}", std::process::id()));
        let user = own_directory(&directory, "postgres")?;
        let port = free_port()?;
        let shown = directory.display();
        let mut configuration = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {shown}/users\npool_mode = transaction\n\
             default_pool_size = {pool_size}\nmax_client_conn = 1000\npidfile = {shown}/pid\nlogfile = {shown}/log\n\
             admin_users = postgres\n",
            server.port()
        );
        for (name, value) in settings {
            configuration.push_str(&format!("{name} = {value}\n"));
        }
        fs::write(directory.join("ini"), configuration)?;
        fs::write(directory.join("users"), "\"postgres\" \"\"\n")?;
        stop_after_this_process(&format!("kill -9 $(cat '{shown}/pid')"), &directory)?;
        let bouncer = Self { directory, program, port, user, process: Mutex::new(None) };
        bouncer.up()?;
        Ok(bouncer)
    }

    /// The URL of the database `postgres` behind it, for the server's superuser.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Kills it, and with it every connection, and starts it again.
    ///
    /// # Errors
    /// When it does not start.
    pub fn crash_and_restart(&self) -> io::Result<()> {
        self.kill()?;
        self.up()
    }

    fn kill(&self) -> io::Result<()> {
        if let Some(mut process) = self.process.lock().unwrap_or_else(PoisonError::into_inner).take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    fn up(&self) -> io::Result<()> {
        // It would take a file that was left for another process.
        let _ = fs::remove_file(self.directory.join("pid"));
        let mut command = Command::new(&self.program);
        command.arg("-q").arg(self.directory.join("ini")).current_dir(&self.directory);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        let mut process = command.spawn()?;
        let end = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let ended = process.try_wait()?;
            if ended.is_some() || Instant::now() > end {
                let said = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
                return Err(io::Error::other(format!("pgbouncer did not start: {}", said.trim())));
            }
            sleep(Duration::from_millis(10));
        }
        *self.process.lock().unwrap_or_else(PoisonError::into_inner) = Some(process);
        Ok(())
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // A test that has failed must not fail once more here.
        let _ = self.kill();
        let _ = fs::remove_dir_all(&self.directory);
    }
}
