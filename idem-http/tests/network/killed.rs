//! The server's process is killed while a handler runs, and started again.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::routing::post;
use idem_core::executor::{Executor, Reconciliation, Recovery};
use idem_http::{IdempotencyLayer, SingleTenant};
use reqwest::{Client, Response};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

const LEASE: Duration = Duration::from_millis(1_500);

/// What a process of this test serves: a policy for keys whose holder died, a schema, and a URL.
pub(crate) async fn serve(served: &str) {
    let [policy, schema, url] = served.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let recovery = match policy {
        "rerun" => Recovery::Rerun,
        "refuse" => Recovery::Refuse,
        "ask" => Recovery::reconcile(|_| async {
            let found =
                http::Response::builder().status(201).header("location", "/found").body("found".into()).unwrap();
            Reconciliation::Executed(idem_http::outcome(&found))
        }),
        other => panic!("{other}"),
    };
    let store = crate::open(url, schema).await;
    let executor = Executor::builder(store).lease(LEASE).on_abandoned(recovery).build().unwrap();
    let layer = IdempotencyLayer::new(executor, SingleTenant);
    let router = Router::new()
        .route("/", post(charge))
        .layer(layer.clone())
        .route("/running", axum::routing::get(|| async { HANDLERS.load(Ordering::SeqCst).to_string() }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    #[expect(clippy::print_stdout, reason = "the test reads it")]
    {
        println!("{}", listener.local_addr().unwrap());
    }
    axum::serve(listener, router).with_graceful_shutdown(stop()).await.unwrap();
    layer.drain(Duration::from_secs(30)).await.unwrap();
}

#[derive(serde::Deserialize)]
struct Wanted {
    millis: u64,
}

/// Those that have begun. Their keys are held.
static HANDLERS: AtomicUsize = AtomicUsize::new(0);

async fn charge(Query(wanted): Query<Wanted>, axum::Extension(attempt): axum::Extension<idem_http::Attempt>) -> String {
    HANDLERS.fetch_add(1, Ordering::SeqCst);
    // Long for the first attempt only.
    if attempt.number() == 1 {
        sleep(Duration::from_millis(wanted.millis)).await;
    }
    format!("attempt {}", attempt.number())
}

async fn stop() {
    let mut signals = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
    signals.recv().await;
}

/// The process, killed when dropped.
struct Server {
    process: Child,
    base: String,
    client: Client,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    fn start(policy: &str, schema: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .env("IDEM_HTTP_SERVE", format!("{policy} {schema} {}", crate::url()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let base = format!("http://{}", line.trim());
        Self { process, base, client: Client::builder().no_proxy().build().unwrap() }
    }

    fn charge(&self, millis: u64) -> impl Future<Output = reqwest::Result<Response>> + Send + 'static {
        self.client.post(format!("{}/?millis={millis}", self.base)).header("idempotency-key", "k").send()
    }

    async fn until_it_runs(&self) {
        let running = format!("{}/running", self.base);
        while self.client.get(&running).send().await.unwrap().text().await.unwrap() != "1" {
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A repeat gets what the policy says.
pub(crate) async fn killed() {
    for (policy, status, replayed, body) in [
        ("rerun", 200, false, "attempt 2"),
        ("refuse", 500, false, "urn:idem:problem:abandoned"),
        ("ask", 201, true, "found"),
    ] {
        let schema = crate::backend::fresh_schema();
        let server = Server::start(policy, &schema);
        let client = tokio::spawn(server.charge(60_000));
        server.until_it_runs().await;
        drop(server);
        assert!(client.await.unwrap().is_err(), "no answer from the dead");

        let server = Server::start(policy, &schema);
        let begun = Instant::now();
        let mut refusals = 0;
        let answer = loop {
            let answer = server.charge(60_000).await.unwrap();
            if answer.status() != 409 {
                break answer;
            }
            assert_eq!(answer.headers()["retry-after"], "1");
            refusals += 1;
            assert!(begun.elapsed() < Duration::from_secs(30));
            sleep(Duration::from_millis(50)).await;
        };
        assert!(refusals > 0, "its lease still ran");
        let found = (answer.status().as_u16(), answer.headers().contains_key("idempotent-replayed"));
        assert_eq!(found, (status, replayed), "{policy}");
        let text = answer.text().await.unwrap();
        assert!(text.contains(body), "{text}");
    }
}

/// SIGTERM: no new request, and the handler whose client has gone is finished and stored.
pub(crate) async fn stopped() {
    let schema = crate::backend::fresh_schema();
    let mut server = Server::start("refuse", &schema);
    let client = tokio::spawn(server.charge(700));
    server.until_it_runs().await;
    client.abort();
    let terminated = Command::new("kill").arg(server.process.id().to_string()).status().unwrap();
    assert!(terminated.success());
    let status = tokio::task::spawn_blocking(move || server.process.wait().unwrap()).await.unwrap();
    assert!(status.success());
    let server = Server::start("refuse", &schema);
    let answer = server.charge(700).await.unwrap();
    assert!(answer.headers().contains_key("idempotent-replayed"));
    assert_eq!(answer.text().await.unwrap(), "attempt 1");
}
