//! Private servers for tests: found on the machine, started on a free port in a directory of their own, and stopped with
//! the test.

use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

mod postgres;

pub use postgres::PostgresServer;

/// A port of the loopback interface that was free a moment ago.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Lets a shell outlive this process that stops the server (by that command) and removes its directory: whatever way the
/// process ends, and although statics are never dropped.
fn stop_after_this_process(stop: &str, directory: &Path) -> io::Result<()> {
    let script = format!(
        "while kill -0 {} 2>/dev/null; do sleep 0.2; done; {stop}; rm -rf '{}'",
        std::process::id(),
        directory.display()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    #[cfg(unix)]
    // In a group of its own, so that it is not interrupted with the test.
    std::os::unix::process::CommandExt::process_group(&mut shell, 0);
    shell.spawn().map(drop)
}
