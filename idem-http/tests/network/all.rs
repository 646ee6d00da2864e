//! What holds over real HTTP on every store: each of these takes a store of its own.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::routing::post;
use http::{HeaderMap, HeaderValue, Response};
use idem_core::executor::{Executor, Waiting};
use idem_core::{Key, KeyStore};
use idem_http::{IdempotencyLayer, SingleTenant};
use reqwest::{Client, Version};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// Hands the list of all tests to a macro.
macro_rules! list {
    ($then:ident) => {
        $then! {
            many_at_once_over_http1,
            many_at_once_over_http2,
            a_client_that_hangs_up_over_http1,
            a_client_that_hangs_up_over_http2,
            pipelined_requests_on_one_connection,
            a_slow_upload_reserves_nothing,
            an_upload_that_breaks_off,
            a_slow_download,
            chunks_both_ways,
            a_stream_comes_as_it_is_made,
            bodies_of_all_sizes,
            headers_of_all_kinds,
            a_replay_has_the_same_bytes_on_the_wire,
            a_client_that_asks_before_it_sends,
        }
    };
}

pub(crate) use list;

/// A server on a port of its own.
struct Server {
    address: SocketAddr,
    layer: IdempotencyLayer,
    runs: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[derive(Clone)]
struct App {
    runs: Arc<AtomicUsize>,
}

impl App {
    fn run(&self) -> usize {
        self.runs.fetch_add(1, Ordering::SeqCst) + 1
    }
}

const LIMIT: usize = 300_000;

impl Server {
    async fn start(store: Arc<dyn KeyStore>, waiting: Waiting) -> Self {
        let executor = Executor::builder(store).waiting(waiting).build().unwrap();
        let layer = IdempotencyLayer::new(executor, SingleTenant)
            .with_body_limit(LIMIT)
            .with_streaming_after(Duration::from_millis(300));
        let runs = Arc::new(AtomicUsize::new(0));
        let router = Router::new()
            .route("/slow", post(slow))
            .route("/echo", post(echo))
            .route("/large", post(large))
            .route("/stream", post(stream))
            .route("/headers", post(headers))
            .route("/empty/{status}", post(empty))
            .layer(layer.clone())
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(App { runs: Arc::clone(&runs) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, layer, runs, serving }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    async fn until_runs(&self, runs: usize) {
        timeout(Duration::from_secs(30), async {
            while self.runs() < runs {
                sleep(Duration::from_millis(2)).await;
            }
        })
        .await
        .unwrap();
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn is_known(&self, key: &str) -> bool {
        self.layer.executor().store().fetch(&Key::new("", key).unwrap()).await.unwrap().is_some()
    }

    async fn post(&self, client: &Client, path: &str, key: &str, body: impl Into<reqwest::Body>) -> Answer {
        let request = client.post(self.url(path)).header("idempotency-key", key).body(body);
        Answer::of(request.send().await.unwrap()).await
    }
}

async fn slow(State(app): State<App>) -> Response<Body> {
    let run = app.run();
    sleep(Duration::from_millis(300)).await;
    let mut response = Response::builder().status(201).header("location", format!("/charges/{run}"));
    for line in 0..5 {
        response = response.header("x-line", line);
    }
    response.body(Body::from(vec![0, 0xff, b'\r', b'\n', 7])).unwrap()
}

async fn echo(State(app): State<App>, body: Bytes) -> Bytes {
    app.run();
    body
}

async fn large(State(app): State<App>) -> Bytes {
    app.run();
    pattern(900_000)
}

async fn stream(State(app): State<App>) -> Response<Body> {
    app.run();
    let (send, receive) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        for part in 0..5_u8 {
            if send.send(Bytes::from(vec![part; 10])).await.is_err() {
                return;
            }
            sleep(Duration::from_millis(200)).await;
        }
    });
    Response::new(Body::new(Received(receive)))
}

struct Received(tokio::sync::mpsc::Receiver<Bytes>);

impl http_body::Body for Received {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|data| data.map(|data| Ok(http_body::Frame::data(data))))
    }
}

async fn headers(State(app): State<App>) -> Response<Body> {
    app.run();
    let mut response = Response::new(Body::from("ok"));
    for line in 0..100 {
        let value = [&b"a, b;c=\"d\", \xe4\xff "[..], line.to_string().as_bytes()].concat();
        response.headers_mut().append("x-repeated", HeaderValue::from_bytes(&value).unwrap());
    }
    response.headers_mut().append("set-cookie", HeaderValue::from_static("secret=1"));
    response
}

async fn empty(State(app): State<App>, axum::extract::Path(status): axum::extract::Path<u16>) -> Response<Body> {
    app.run();
    Response::builder().status(status).header("etag", "\"1\"").body(Body::empty()).unwrap()
}

fn pattern(bytes: usize) -> Bytes {
    (0..bytes).map(|at| (at % 251) as u8).collect()
}

fn http1() -> Client {
    Client::builder().no_proxy().http1_only().build().unwrap()
}

fn http2() -> Client {
    Client::builder().no_proxy().http2_prior_knowledge().build().unwrap()
}

/// An answer, read whole.
#[derive(Debug, PartialEq)]
struct Answer {
    version: Version,
    status: u16,
    /// Without what differs by nature: the date, and whether it is a replay.
    headers: HeaderMap,
    replayed: bool,
    body: Bytes,
}

impl Answer {
    async fn of(response: reqwest::Response) -> Self {
        let (version, status, mut headers) =
            (response.version(), response.status().as_u16(), response.headers().clone());
        headers.remove("date");
        let replayed = headers.remove("idempotent-replayed").is_some_and(|value| value == "true");
        Self { version, status, headers, replayed, body: response.bytes().await.unwrap() }
    }
}

fn wait() -> Waiting {
    Waiting::UpTo(Duration::from_secs(60))
}

async fn many_at_once(store: Arc<dyn KeyStore>, client: Client, version: Version) {
    let server = Arc::new(Server::start(store, wait()).await);
    let mut callers = JoinSet::new();
    for _ in 0..200 {
        let (server, client) = (Arc::clone(&server), client.clone());
        callers.spawn(async move { server.post(&client, "/slow", "k", "order").await });
    }
    let answers = callers.join_all().await;
    assert_eq!((answers.len(), server.runs()), (200, 1));
    let first = answers.iter().find(|answer| !answer.replayed).unwrap();
    assert_eq!(
        (first.version, first.status, &first.headers["location"]),
        (version, 201, &HeaderValue::from_static("/charges/1"))
    );
    assert_eq!(first.headers["content-length"], "5");
    for answer in &answers {
        assert_eq!((answer.status, &answer.headers, &answer.body), (first.status, &first.headers, &first.body));
    }
    assert_eq!(answers.iter().filter(|answer| answer.replayed).count(), 199);
}

pub(crate) async fn many_at_once_over_http1(store: Arc<dyn KeyStore>) {
    many_at_once(store, http1(), Version::HTTP_11).await;
}

pub(crate) async fn many_at_once_over_http2(store: Arc<dyn KeyStore>) {
    many_at_once(store, http2(), Version::HTTP_2).await;
}

/// Pitfall 24.
async fn hang_up(store: Arc<dyn KeyStore>, client: Client) {
    let server = Server::start(store, Waiting::Refuse).await;
    let request = client.post(server.url("/slow")).header("idempotency-key", "k").body("order");
    let hasty = tokio::spawn(request.send());
    server.until_runs(1).await;
    hasty.abort();
    assert!(hasty.await.unwrap_err().is_cancelled());
    let told = server.post(&client, "/slow", "k", "order").await;
    assert_eq!(
        (told.status, &told.headers["content-type"]),
        (409, &HeaderValue::from_static("application/problem+json"))
    );
    server.layer.drain(Duration::from_secs(30)).await.unwrap();
    let replay = server.post(&client, "/slow", "k", "order").await;
    assert_eq!((replay.status, replay.replayed, server.runs()), (201, true, 1));
    assert_eq!(replay.headers["location"], "/charges/1");
}

pub(crate) async fn a_client_that_hangs_up_over_http1(store: Arc<dyn KeyStore>) {
    hang_up(store, http1()).await;
}

pub(crate) async fn a_client_that_hangs_up_over_http2(store: Arc<dyn KeyStore>) {
    hang_up(store, http2()).await;
}

fn raw(path: &str, key: &str, rest: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\nidempotency-key: {key}\r\n{rest}")
}

/// Reads that many responses with a content length.
async fn read_responses(stream: &mut TcpStream, count: usize) -> Vec<(String, Vec<u8>)> {
    let (mut buffer, mut found) = (Vec::new(), Vec::new());
    while found.len() < count {
        let mut part = [0; 4096];
        let read = timeout(Duration::from_secs(30), stream.read(&mut part)).await.unwrap().unwrap();
        assert!(read > 0, "the connection was closed after {found:?}");
        buffer.extend_from_slice(&part[..read]);
        while let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&buffer[..end + 2]).into_owned();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if buffer.len() < end + 4 + length {
                break;
            }
            let body = buffer[end + 4..end + 4 + length].to_vec();
            buffer.drain(..end + 4 + length);
            found.push((head, body));
        }
    }
    assert!(buffer.is_empty());
    found
}

pub(crate) async fn pipelined_requests_on_one_connection(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    let mut stream = server.connect().await;
    let order = |key: &str, body: &str| raw("/echo", key, &format!("content-length: {}\r\n\r\n{body}", body.len()));
    // The fifth is refused before its body is read, which must not become the sixth's head.
    let all = [
        order("a", "one"),
        order("a", "one"),
        order("b", "two"),
        order("a", "another"),
        order("\"no key", "POST / HTTP/1.1"),
        order("b", "two"),
    ]
    .concat();
    stream.write_all(all.as_bytes()).await.unwrap();
    let found = read_responses(&mut stream, 6).await;
    let told: Vec<_> = found
        .iter()
        .map(|(head, body)| {
            let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
            let body = if status == 200 { String::from_utf8_lossy(body).into_owned() } else { String::new() };
            (status, head.contains("idempotent-replayed: true"), body)
        })
        .collect();
    let told: Vec<_> = told.iter().map(|(status, replayed, body)| (*status, *replayed, body.as_str())).collect();
    assert_eq!(
        told,
        [
            (200, false, "one"),
            (200, true, "one"),
            (200, false, "two"),
            (422, false, ""),
            (400, false, ""),
            (200, true, "two")
        ]
    );
    assert_eq!(server.runs(), 2);
}

pub(crate) async fn a_slow_upload_reserves_nothing(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    let mut slow = server.connect().await;
    slow.write_all(raw("/echo", "k", "content-length: 6\r\n\r\nabc").as_bytes()).await.unwrap();
    sleep(Duration::from_millis(150)).await;
    assert!(!server.is_known("k").await);
    // Another is quicker.
    let quick = server.post(&http1(), "/echo", "k", "abcdef").await;
    assert_eq!((quick.status, quick.replayed), (200, false));
    slow.write_all(b"def").await.unwrap();
    let (head, body) = read_responses(&mut slow, 1).await.remove(0);
    assert!(head.contains("idempotent-replayed: true") && body == b"abcdef", "{head}");
    assert_eq!(server.runs(), 1);
}

/// Pitfall 36.
pub(crate) async fn an_upload_that_breaks_off(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    for rest in [
        "content-length: 6\r\n\r\nabc",
        "transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        "transfer-encoding: chunked\r\n\r\nnonsense\r\n",
    ] {
        let mut stream = server.connect().await;
        stream.write_all(raw("/echo", "k", rest).as_bytes()).await.unwrap();
        sleep(Duration::from_millis(30)).await;
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let _ = timeout(Duration::from_secs(30), stream.read_to_end(&mut answer)).await.unwrap();
        let text = String::from_utf8_lossy(&answer);
        assert!(text.is_empty() || text.starts_with("HTTP/1.1 400"), "{text}");
        assert!(!server.is_known("k").await);
    }
    assert_eq!(server.runs(), 0);
    let whole = server.post(&http1(), "/echo", "k", "abcdef").await;
    assert_eq!((whole.status, &whole.body[..]), (200, &b"abcdef"[..]));
}

pub(crate) async fn a_slow_download(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    let mut bodies = Vec::new();
    for _ in 0..2 {
        let mut stream = server.connect().await;
        stream
            .write_all(raw("/large", "k", "content-length: 0\r\nconnection: close\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut answer = Vec::new();
        let mut part = vec![0; 50_000];
        loop {
            sleep(Duration::from_millis(5)).await;
            let read = stream.read(&mut part).await.unwrap();
            if read == 0 {
                break;
            }
            answer.extend_from_slice(&part[..read]);
        }
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        bodies.push(answer.split_off(end + 4));
    }
    assert!(bodies.iter().all(|body| *body == pattern(900_000)));
    assert_eq!(server.runs(), 1);
}

pub(crate) async fn chunks_both_ways(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    for (name, client) in [("1", http1()), ("2", http2())] {
        for replayed in [false, true] {
            let (send, receive) = tokio::sync::mpsc::channel(1);
            tokio::spawn(async move {
                for part in [&b"one"[..], b"two", b"\0\xff"] {
                    send.send(Bytes::from_static(part)).await.unwrap();
                    sleep(Duration::from_millis(10)).await;
                }
            });
            let body = reqwest::Body::wrap(Received(receive));
            let answer = server.post(&client, "/echo", name, body).await;
            assert_eq!((&answer.body[..], answer.replayed), (&b"onetwo\0\xff"[..], replayed));
        }
        // The same bytes in one piece are the same request.
        assert!(server.post(&client, "/echo", name, &b"onetwo\0\xff"[..]).await.replayed);
    }
    assert_eq!(server.runs(), 2);
}

/// Pitfall 35.
pub(crate) async fn a_stream_comes_as_it_is_made(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    for (name, client) in [("1", http1()), ("2", http2())] {
        let request = client.post(server.url("/stream")).header("idempotency-key", name);
        let mut first = request.send().await.unwrap();
        assert_eq!((first.status().as_u16(), first.headers().get("content-length")), (200, None));
        let part = first.chunk().await.unwrap().unwrap();
        assert_eq!(part[0], 0);
        // Its end has not come, and repeats know it.
        let repeat = server.post(&client, "/stream", name, "").await;
        assert_eq!((repeat.status, repeat.replayed), (410, false));
        let mut whole = part.to_vec();
        while let Some(part) = first.chunk().await.unwrap() {
            whole.extend_from_slice(&part);
        }
        assert_eq!(whole, (0..5_u8).flat_map(|part| [part; 10]).collect::<Vec<_>>());
    }
    assert_eq!(server.runs(), 2);
}

/// Pitfall 26.
pub(crate) async fn bodies_of_all_sizes(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    for (name, client) in [("1", http1()), ("2", http2())] {
        for size in [0, 1, 2, 16_384, 65_536, LIMIT] {
            let (key, body) = (format!("{name}-{size}"), pattern(size));
            let first = server.post(&client, "/echo", &key, body.clone()).await;
            let replay = server.post(&client, "/echo", &key, body.clone()).await;
            assert_eq!((first.status, replay.status, first.replayed, replay.replayed), (200, 200, false, true));
            assert!(first.body == body && replay.body == body && first.headers == replay.headers, "{size}");
        }
        let refused = server.post(&client, "/echo", &format!("{name}-over"), pattern(LIMIT + 1)).await;
        assert_eq!((refused.status, server.is_known(&format!("{name}-over")).await), (413, false));
    }
    assert_eq!(server.runs(), 12);
}

/// Sends it on a connection of its own, and returns the bytes of the answer.
async fn exchange(server: &Server, request: &str) -> Vec<u8> {
    let mut stream = server.connect().await;
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    timeout(Duration::from_secs(30), stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    answer
}

/// Pitfalls 31 to 33.
pub(crate) async fn headers_of_all_kinds(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    // By hand: clients of HTTP/1.1 take no more than a hundred.
    let request = raw("/headers", "1", "content-length: 0\r\nconnection: close\r\n\r\n");
    let mut answers = Vec::new();
    for _ in 0..2 {
        let answer = exchange(&server, &request).await;
        let lines = answer.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"x-repeated: "));
        answers.push((lines.map(<[u8]>::to_vec).collect::<Vec<_>>(), String::from_utf8_lossy(&answer).into_owned()));
    }
    assert_eq!((answers[0].0.len(), &answers[0].0), (100, &answers[1].0));
    assert_eq!(answers[1].0[7], b"x-repeated: a, b;c=\"d\", \xe4\xff 7\r");
    assert!(answers[0].1.contains("set-cookie: ") && !answers[1].1.contains("set-cookie: "));
    assert!(answers[1].1.contains("idempotent-replayed: true"));

    let client = http2();
    let mut first = server.post(&client, "/headers", "2", "").await;
    let replay = server.post(&client, "/headers", "2", "").await;
    assert!(replay.replayed && first.headers.remove("set-cookie").is_some());
    let lines = |answer: &Answer| answer.headers.get_all("x-repeated").iter().cloned().collect::<Vec<_>>();
    assert_eq!((lines(&first).len(), lines(&first)), (100, lines(&replay)));
    assert_eq!(first.headers, replay.headers);
    assert!(lines(&replay)[7].as_bytes() == b"a, b;c=\"d\", \xe4\xff 7");
}

/// Pitfall 34.
pub(crate) async fn a_replay_has_the_same_bytes_on_the_wire(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    for (path, end) in [("/empty/204", ""), ("/empty/304", ""), ("/empty/200", ""), ("/echo", "\0\u{7f}x")] {
        let mut texts = Vec::new();
        for _ in 0..2 {
            let rest = format!("content-length: {}\r\nconnection: close\r\n\r\n{end}", end.len());
            let answer = exchange(&server, &raw(path, path.trim_matches('/'), &rest)).await;
            let answer = String::from_utf8(answer).unwrap();
            texts.push(answer);
        }
        assert!(texts[1].contains("idempotent-replayed: true\r\n"), "{}", texts[1]);
        let plain = |text: &String| {
            let mut lines: Vec<_> = text
                .split("\r\n")
                .filter(|line| !line.starts_with("date: ") && !line.starts_with("idempotent-replayed"))
                .map(str::to_owned)
                .collect();
            let heads = lines.iter().position(String::is_empty).unwrap();
            lines[1..heads].sort();
            lines
        };
        assert_eq!(plain(&texts[0]), plain(&texts[1]));
        assert!(texts[0].ends_with(&format!("\r\n\r\n{end}")), "{}", texts[0]);
    }
}

/// With `Expect: 100-continue`, what can be refused by its head is refused before the body is asked for.
pub(crate) async fn a_client_that_asks_before_it_sends(store: Arc<dyn KeyStore>) {
    let server = Server::start(store, Waiting::Refuse).await;
    for (key, length, status) in [("k", LIMIT + 1, "413"), ("\"no key", 6, "400"), ("k", 6, "100")] {
        let mut stream = server.connect().await;
        let rest = format!("content-length: {length}\r\nexpect: 100-continue\r\n\r\n");
        stream.write_all(raw("/echo", key, &rest).as_bytes()).await.unwrap();
        let mut part = [0; 12];
        timeout(Duration::from_secs(30), stream.read_exact(&mut part)).await.unwrap().unwrap();
        assert_eq!(String::from_utf8_lossy(&part), format!("HTTP/1.1 {status}"));
        if status == "100" {
            let mut rest = [0; 13];
            stream.read_exact(&mut rest).await.unwrap();
            stream.write_all(b"abcdef").await.unwrap();
            let (head, body) = read_responses(&mut stream, 1).await.remove(0);
            assert!(head.starts_with("HTTP/1.1 200") && body == b"abcdef", "{head}");
        }
    }
    assert_eq!(server.runs(), 1);
}
