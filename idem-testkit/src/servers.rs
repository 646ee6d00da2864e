//! Private servers for tests: found on the machine, started on a free port in a directory of their own, and stopped with
//! the test.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output, Stdio};

mod fdb;
mod pgbouncer;
mod postgres;
mod redis;

pub use fdb::{FdbCluster, FdbPrograms};
pub use pgbouncer::PgBouncer;
pub use postgres::PostgresServer;
pub use redis::{RedisCluster, RedisFailover, RedisServer, Reply};

/// A port of the loopback interface that was free a moment ago.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Makes a directory that nobody else may look into. It belongs to that user, whose ids are given, where this process runs
/// as root, which some servers refuse to run as.
fn own_directory(directory: &Path, user: &str) -> io::Result<Option<(u32, u32)>> {
    fs::create_dir_all(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))?;
    let user = if is_root()? { Some(ids_of(user)?) } else { None };
    if let Some((uid, gid)) = user {
        chown(directory, Some(uid), Some(gid))?;
    }
    Ok(user)
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

fn succeed(output: Output) -> io::Result<Output> {
    if output.status.success() {
        return Ok(output);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{}: {}", output.status, said.trim())))
}

/// Lets a shell outlive this process that stops the server (by that command) and removes its directory: whatever way the
/// process ends, and although statics are never dropped. It ends too when the directory is removed.
fn stop_after_this_process(stop: &str, directory: &Path) -> io::Result<()> {
    let script = format!(
        "while kill -0 {} 2>/dev/null && [ -d '{directory}' ]; do sleep 0.2; done; {stop}; rm -rf '{directory}'",
        std::process::id(),
        directory = directory.display()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    #[cfg(unix)]
    // In a group of its own, so that it is not interrupted with the test.
    std::os::unix::process::CommandExt::process_group(&mut shell, 0);
    shell.spawn().map(drop)
}
