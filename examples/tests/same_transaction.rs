//! Charge, balance and key in one transaction: the payments API, whose server and whose own process are killed at every
//! step, and which is suspended while another process takes its key over.
//!
//! A trigger in the database stops a transaction at a step, behind a lock that the test holds.
#![allow(clippy::panic, clippy::unwrap_used, reason = "the helpers of tests are tests")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use idem_postgres::sqlx::{self, Connection, PgConnection};
use idem_testkit::Missing;
use idem_testkit::servers::PostgresServer;
use reqwest::Client;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::sleep;

static SERVER: LazyLock<Result<PostgresServer, String>> =
    LazyLock::new(|| PostgresServer::start(&[]).map_err(|error| error.to_string()));

macro_rules! tests {
    ($($name:ident,)+) => {
        fn main() -> ExitCode {
            let missing = SERVER.as_ref().err().map(|reason| Missing { server: "postgres", reason: reason.clone() });
            idem_testkit::run_tests(missing.as_ref(), &[$((stringify!($name), || block_on($name()))),+])
        }
    };
}

tests! {
    the_demo_runs_to_its_end_again_and_again,
    it_needs_a_postgres_store,
    many_at_once_are_charged_once,
    the_server_is_killed_at_every_step,
    the_client_is_killed_at_every_step,
    the_client_is_killed_and_repeats_come_before_its_transaction_ends,
    another_process_takes_over_while_the_first_holds_its_transaction,
    a_charge_on_account_waits_for_one_that_holds_its_transaction,
}

fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

/// As short as a busy machine bears.
const LEASE_SECONDS: u64 = 2;

/// Where a transaction is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Before the charge.
    Begin,
    /// Behind the charge.
    Charge,
    /// Behind the balance.
    Balance,
    /// Behind the completion of the key.
    Complete,
    /// Within the commit.
    Commit,
    /// Behind the commit, before its answer is read.
    Answer,
}

const STEPS: [Step; 6] = [Step::Begin, Step::Charge, Step::Balance, Step::Complete, Step::Commit, Step::Answer];

impl Step {
    fn trigger(self) -> &'static str {
        match self {
            Self::Begin => "CREATE TRIGGER gate BEFORE INSERT ON payments.charges",
            Self::Charge => "CREATE TRIGGER gate AFTER INSERT ON payments.charges",
            Self::Balance => "CREATE TRIGGER gate AFTER INSERT OR UPDATE ON payments.balances",
            Self::Complete => "CREATE TRIGGER gate AFTER UPDATE OF state ON idem.records",
            Self::Commit | Self::Answer => {
                "CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON payments.charges DEFERRABLE INITIALLY DEFERRED"
            }
        }
    }
}

/// By the executor and its lease, and on account in one transaction alone.
const CARDS: [&str; 2] = ["visa", "account"];

/// A server of a test's own, to be killed, with the tables of both.
struct Database(&'static PostgresServer);

impl Database {
    fn start() -> Self {
        let server: &'static PostgresServer = Box::leak(Box::new(PostgresServer::start(&[]).unwrap()));
        // The API makes its tables.
        drop(Api::start(&server.url()));
        Self(server)
    }

    async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.0.url()).await.unwrap()
    }

    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&mut self.connect().await).await.unwrap()
    }

    /// Stops the next transactions at the step.
    async fn close_gate(&self, step: Step) -> Gate {
        let mut lock = self.connect().await;
        let sql = format!(
            "DROP TRIGGER IF EXISTS gate ON payments.charges;
             DROP TRIGGER IF EXISTS gate ON payments.balances;
             DROP TRIGGER IF EXISTS gate ON idem.records;
             CREATE OR REPLACE FUNCTION payments.gate() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN new; END $$;
             {} FOR EACH ROW EXECUTE FUNCTION payments.gate();
             SELECT pg_advisory_lock(4711)",
            step.trigger()
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut lock).await.unwrap();
        Gate { lock }
    }

    /// Until a transaction is stopped there.
    async fn gate_is_reached(&self) {
        const WAITING: &str =
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted";
        wait_until("the step is reached", async || self.number(WAITING).await > 0).await;
    }

    async fn charges(&self, account: &str) -> (i64, i64) {
        sqlx::query_as("SELECT count(*), coalesce(sum(amount), 0)::bigint FROM payments.charges WHERE account = $1")
            .bind(account)
            .fetch_one(&mut self.connect().await)
            .await
            .unwrap()
    }

    /// The state of the order's key, and its attempt.
    async fn key(&self, account: &str) -> Option<(String, i32)> {
        sqlx::query_as("SELECT state::text, attempt FROM idem.overview WHERE scope = $1 AND id = 'order'")
            .bind(account)
            .fetch_optional(&mut self.connect().await)
            .await
            .unwrap()
    }

    /// One order beside the warm-up: one charge, the balance is the sum, the key is completed.
    async fn is_charged_once(&self, account: &str) {
        let (charges, sum) = self.charges(account).await;
        assert_eq!((charges, sum), (2, 1_250), "{account}");
        let balance: (i64, i64) = sqlx::query_as("SELECT charges, balance FROM payments.balances WHERE account = $1")
            .bind(account)
            .fetch_one(&mut self.connect().await)
            .await
            .unwrap();
        assert_eq!(balance, (charges, sum), "{account}");
        assert_eq!(self.key(account).await.unwrap().0, "completed", "{account}");
    }
}

/// Holds the lock that transactions wait for.
struct Gate {
    lock: PgConnection,
}

impl Gate {
    async fn open(self) {
        self.lock.close().await.unwrap();
    }
}

async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds().await {
        assert!(Instant::now() < end, "{what}: not in time");
        sleep(Duration::from_millis(20)).await;
    }
}

/// The program, killed (-9) when dropped.
struct Api {
    process: Child,
    base: String,
    client: Client,
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Answer {
    status: u16,
    replayed: bool,
    body: String,
}

impl Api {
    fn start(store: &str) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_payments"))
            .args(["--listen", "127.0.0.1:0", "--store", store, "--same-transaction"])
            .args(["--lease", &LEASE_SECONDS.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let base = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self { process, base, client: Client::builder().no_proxy().timeout(Duration::from_secs(90)).build().unwrap() }
    }

    /// Sends a request, whoever waits for its answer. `None` when there is none.
    fn send(&self, account: &str, key: &str, amount: u32, card: &str) -> JoinHandle<Option<Answer>> {
        let path = if card == "account" { "charges-on-account" } else { "charges" };
        let request = self
            .client
            .post(format!("{}/{path}", self.base))
            .bearer_auth(account)
            .header("idempotency-key", key)
            .json(&json!({ "amount": amount, "card": card }));
        tokio::spawn(async move {
            let response = request.send().await.ok()?;
            let replayed = response.headers().contains_key("idempotent-replayed");
            Some(Answer { status: response.status().as_u16(), replayed, body: response.text().await.ok()? })
        })
    }

    fn order(&self, account: &str, card: &str) -> JoinHandle<Option<Answer>> {
        self.send(account, "order", 1_200, card)
    }

    /// A charge before all others, so that there is a balance already.
    async fn warm_up(&self, account: &str) {
        assert_eq!(self.send(account, "warm-up", 50, "visa").await.unwrap().unwrap().status, 201);
    }

    /// Repeats the order as a client does: until it has an answer that is none of "come back later".
    async fn insist(&self, account: &str, card: &str) -> Answer {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match self.order(account, card).await.unwrap() {
                Some(answer) if ![409, 503].contains(&answer.status) => return answer,
                answer => assert!(Instant::now() < end, "no answer in time: {answer:?}"),
            }
            sleep(Duration::from_millis(100)).await;
        }
    }

    fn signal(&self, name: &str) {
        let process = self.process.id().to_string();
        assert!(Command::new("kill").args([name, &process]).status().unwrap().success());
        if name == "-STOP" {
            // The signal stops one thread, which stops the others; until then, these run on.
            let end = Instant::now() + Duration::from_secs(30);
            while !is_stopped(&process) {
                assert!(Instant::now() < end, "it does not stop");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Whether all threads of a process stand still.
fn is_stopped(process: &str) -> bool {
    std::fs::read_dir(format!("/proc/{process}/task")).unwrap().all(|thread| {
        let state = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        // Behind the name, which stands in parentheses.
        state.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    })
}

fn demo(arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_payments")).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

async fn the_demo_runs_to_its_end_again_and_again() {
    let url = SERVER.as_ref().unwrap().url();
    for _ in 0..2 {
        let (success, text, errors) = demo(&["--demo", "--store", &url, "--same-transaction"]);
        assert!(success, "{text}\n{errors}");
        assert!(text.contains("in: postgres, with charges and balances in the same transaction\n"), "{text}");
        assert!(text.contains("alice was charged 1x") && text.contains("erin was charged 1x"), "{text}");
        assert!(text.ends_with("Every order took effect once.\n"), "{text}");
    }
}

async fn it_needs_a_postgres_store() {
    let (success, _, errors) = demo(&["--demo", "--same-transaction"]);
    assert!(!success && errors.contains("--same-transaction needs a postgres store"), "{errors}");
}

/// Requests at two processes.
async fn many_at_once_are_charged_once() {
    let database = Database(SERVER.as_ref().unwrap());
    let apis = [Api::start(&database.0.url()), Api::start(&database.0.url())];
    for card in ["visa", "slow", "account"] {
        let account = format!("many-{card}");
        apis[0].warm_up(&account).await;
        let requests: Vec<_> = (0..40).map(|request| apis[request % 2].order(&account, card)).collect();
        let mut charged = Vec::new();
        for request in requests {
            let answer = request.await.unwrap().unwrap();
            match answer.status {
                201 => charged.push(answer),
                status => assert_eq!(status, 409, "{answer:?}"),
            }
        }
        assert_eq!(charged.iter().filter(|answer| !answer.replayed).count(), 1, "{charged:?}");
        assert!(charged.iter().all(|answer| answer.body == charged[0].body));
        database.is_charged_once(&account).await;
    }
}

/// The order is repeated after the trouble, and once more. The first answer may be lost or not; where there is one, it is
/// the truth.
async fn is_charged_once_after_all(database: &Database, api: &Api, account: &str, card: &str, first: Option<Answer>) {
    let answer = api.insist(account, card).await;
    assert_eq!(answer.status, 201, "{account}: {answer:?}");
    let again = api.insist(account, card).await;
    assert_eq!((again.replayed, &again.body), (true, &answer.body), "{account}");
    if let Some(first) = first {
        match first.status {
            201 => assert_eq!((first.body, answer.replayed), (answer.body, true), "{account}"),
            status => assert!([409, 503].contains(&status), "{account}: {first:?}"),
        }
    }
    database.is_charged_once(account).await;
}

async fn the_server_is_killed_at_every_step() {
    let database = Database::start();
    for step in STEPS {
        for card in CARDS {
            let account = format!("server-{step:?}-{card}");
            let api = Api::start(&database.0.url());
            api.warm_up(&account).await;
            let gate = database.close_gate(step).await;
            let first = api.order(&account, card);
            database.gate_is_reached().await;
            if step == Step::Answer {
                // It is committed while the client cannot read that.
                api.signal("-STOP");
                gate.open().await;
                wait_until("it is committed", async || database.charges(&account).await.0 == 2).await;
            }
            database.0.crash().unwrap();
            api.signal("-CONT");
            database.0.up().unwrap();
            // Nobody holds the lock any more.
            let charged = database.charges(&account).await.0;
            assert_eq!(charged, if step == Step::Answer { 2 } else { 1 }, "{account}");
            is_charged_once_after_all(&database, &api, &account, card, first.await.unwrap()).await;
        }
    }
}

async fn the_client_is_killed_at_every_step() {
    let database = Database::start();
    for step in STEPS {
        for card in CARDS {
            let account = format!("client-{step:?}-{card}");
            let api = Api::start(&database.0.url());
            api.warm_up(&account).await;
            let gate = database.close_gate(step).await;
            let first = api.order(&account, card);
            database.gate_is_reached().await;
            if step == Step::Answer {
                api.signal("-STOP");
                gate.open().await;
                wait_until("it is committed", async || database.charges(&account).await.0 == 2).await;
                drop(api);
            } else {
                drop(api);
                gate.open().await;
            }
            assert_eq!(first.await.unwrap(), None);
            let api = Api::start(&database.0.url());
            is_charged_once_after_all(&database, &api, &account, card, None).await;
        }
    }
}

/// The server does not know yet that its client is dead: its transaction is under way, and its commit may still come.
async fn the_client_is_killed_and_repeats_come_before_its_transaction_ends() {
    let database = Database::start();
    for step in [Step::Charge, Step::Complete, Step::Commit] {
        for card in CARDS {
            let account = format!("early-{step:?}-{card}");
            let api = Api::start(&database.0.url());
            api.warm_up(&account).await;
            let gate = database.close_gate(step).await;
            let first = api.order(&account, card);
            database.gate_is_reached().await;
            drop(api);
            assert_eq!(first.await.unwrap(), None);
            let api = Api::start(&database.0.url());
            let repeats: Vec<_> = (0..3).map(|_| api.order(&account, card)).collect();
            // Beyond the lease of the dead.
            sleep(Duration::from_millis(LEASE_SECONDS * 1_500)).await;
            gate.open().await;
            let mut charged = 0;
            for repeat in repeats {
                let answer = repeat.await.unwrap().unwrap();
                assert!([201, 409, 503].contains(&answer.status), "{account}: {answer:?}");
                charged += usize::from(answer.status == 201 && !answer.replayed);
            }
            assert!(charged <= 1, "{account}");
            is_charged_once_after_all(&database, &api, &account, card, None).await;
        }
    }
}

/// The first process is suspended with its transaction open, as by a pause of its machine.
async fn another_process_takes_over_while_the_first_holds_its_transaction() {
    let database = Database::start();
    for step in STEPS {
        if step == Step::Answer {
            continue;
        }
        let account = format!("takeover-{step:?}");
        let first = Api::start(&database.0.url());
        first.warm_up(&account).await;
        let gate = database.close_gate(step).await;
        let held = first.order(&account, "visa");
        database.gate_is_reached().await;
        first.signal("-STOP");
        gate.open().await;

        let second = Api::start(&database.0.url());
        let over = Duration::from_millis(LEASE_SECONDS * 1_500);
        const IDLE: &str = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'";
        match step {
            // Nothing of the second's is locked by the first: it charges, and the first has to roll back.
            Step::Begin | Step::Charge => {
                let answer = second.insist(&account, "visa").await;
                assert_eq!((answer.status, answer.replayed), (201, false), "{account}");
                assert_eq!(database.number(IDLE).await, 1, "{account}: the first holds its transaction");
                assert_eq!(database.key(&account).await, Some(("completed".to_owned(), 2)), "{account}");
                first.signal("-CONT");
                assert_eq!(held.await.unwrap().unwrap().status, 503, "{account}");
            }
            // The second has taken over, and waits for the row of the balance.
            Step::Balance => {
                let insisting = tokio::spawn(async move {
                    let second = second;
                    (second.insist("takeover-Balance", "visa").await, second)
                });
                wait_until("it is taken over", async || database.key(&account).await.is_some_and(|key| key.1 == 2))
                    .await;
                sleep(Duration::from_millis(500)).await;
                assert!(!insisting.is_finished() && database.number(IDLE).await == 1, "{account}");
                first.signal("-CONT");
                assert_eq!(held.await.unwrap().unwrap().status, 503, "{account}");
                let (answer, _second) = insisting.await.unwrap();
                assert_eq!((answer.status, answer.replayed), (201, false), "{account}");
            }
            // The first has completed the key: nobody takes it over, though its lease is over.
            Step::Complete => {
                let insisting = tokio::spawn(async move {
                    let second = second;
                    (second.insist("takeover-Complete", "visa").await, second)
                });
                sleep(over).await;
                assert!(!insisting.is_finished() && database.number(IDLE).await == 1, "{account}");
                assert_eq!(database.key(&account).await, Some(("in progress".to_owned(), 1)), "{account}");
                first.signal("-CONT");
                let done = held.await.unwrap().unwrap();
                assert_eq!((done.status, done.replayed), (201, false), "{account}");
                let (answer, _second) = insisting.await.unwrap();
                assert_eq!((answer.replayed, answer.body), (true, done.body), "{account}");
            }
            // It is committed, and the first does not know yet.
            Step::Commit | Step::Answer => {
                let answer = second.insist(&account, "visa").await;
                assert!(answer.replayed, "{account}");
                first.signal("-CONT");
                let done = held.await.unwrap().unwrap();
                assert_eq!((done.status, done.body), (201, answer.body), "{account}");
            }
        }
        is_charged_once_after_all(&database, &first, &account, "visa", None).await;
    }
}

async fn a_charge_on_account_waits_for_one_that_holds_its_transaction() {
    let database = Database::start();
    for step in [Step::Begin, Step::Balance, Step::Complete] {
        let account = format!("account-{step:?}");
        let first = Api::start(&database.0.url());
        first.warm_up(&account).await;
        let gate = database.close_gate(step).await;
        let held = first.order(&account, "account");
        database.gate_is_reached().await;
        first.signal("-STOP");
        gate.open().await;
        let second = Api::start(&database.0.url());
        let repeat = second.order(&account, "account");
        sleep(Duration::from_millis(500)).await;
        assert!(!repeat.is_finished(), "{account}: it did not wait");
        first.signal("-CONT");
        let done = held.await.unwrap().unwrap();
        let answer = repeat.await.unwrap().unwrap();
        assert_eq!((done.status, done.replayed, answer.replayed), (201, false, true), "{account}");
        assert_eq!(done.body, answer.body, "{account}");
        database.is_charged_once(&account).await;
    }
}
