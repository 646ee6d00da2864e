//! A TCP proxy that counts what goes through it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A proxy between a client and a server on the loopback interface. It ends when this is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    counts: Arc<Counts>,
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Counts {
    sent: AtomicU64,
    received: AtomicU64,
    round_trips: AtomicU64,
    connections: AtomicU64,
}

/// What has gone through a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes to the server, as the driver wrote them: without the headers of packets.
    pub sent: u64,
    /// Bytes from the server.
    pub received: u64,
    /// How often the server began to answer after the client had begun to ask, on each connection by itself.
    pub round_trips: u64,
    /// Connections made.
    pub connections: u64,
}

impl Traffic {
    /// What has been added since.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            sent: self.sent - before.sent,
            received: self.received - before.received,
            round_trips: self.round_trips - before.round_trips,
            connections: self.connections - before.connections,
        }
    }
}

impl Proxy {
    /// Starts one before the server at that port.
    ///
    /// # Errors
    /// When there is no port.
    pub async fn start(server: u16) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let counts = Arc::new(Counts::default());
        let task = tokio::spawn(accept(listener, SocketAddr::from(([127, 0, 0, 1], server)), counts.clone()));
        Ok(Self { port, counts, task })
    }

    /// The port to connect to.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What has gone through.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let get = |count: &AtomicU64| count.load(Ordering::SeqCst);
        let Counts { sent, received, round_trips, connections } = &*self.counts;
        Traffic {
            sent: get(sent),
            received: get(received),
            round_trips: get(round_trips),
            connections: get(connections),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, counts: Arc<Counts>) {
    while let Ok((client, _)) = listener.accept().await {
        let Ok(server) = TcpStream::connect(server).await else { continue };
        if client.set_nodelay(true).is_err() || server.set_nodelay(true).is_err() {
            continue;
        }
        counts.connections.fetch_add(1, Ordering::SeqCst);
        let asked = Arc::new(AtomicBool::new(false));
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::spawn(copy(from_client, to_server, counts.clone(), asked.clone(), true));
        tokio::spawn(copy(from_server, to_client, counts.clone(), asked, false));
    }
}

async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    counts: Arc<Counts>,
    asked: Arc<AtomicBool>,
    asks: bool,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(bytes @ 1..) = from.read(&mut buffer).await else { return };
        let count = bytes as u64;
        if asks {
            counts.sent.fetch_add(count, Ordering::SeqCst);
            asked.store(true, Ordering::SeqCst);
        } else {
            counts.received.fetch_add(count, Ordering::SeqCst);
            counts.round_trips.fetch_add(u64::from(asked.swap(false, Ordering::SeqCst)), Ordering::SeqCst);
        }
        let Some(read) = buffer.get(..bytes) else { return };
        if to.write_all(read).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_and_round_trips_are_counted() {
        let echo = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let proxy = Proxy::start(echo.local_addr().unwrap().port()).await.unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = echo.accept().await.unwrap();
            let mut buffer = [0; 4];
            while stream.read_exact(&mut buffer).await.is_ok() {
                stream.write_all(&buffer[..2]).await.unwrap();
            }
        });
        let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).await.unwrap();
        for _ in 0..3 {
            stream.write_all(b"ask!").await.unwrap();
            stream.read_exact(&mut [0; 2]).await.unwrap();
        }
        assert_eq!(proxy.traffic(), Traffic { sent: 12, received: 6, round_trips: 3, connections: 1 });
    }
}
