//! Drives the API as a client would, over HTTP, and checks what it gets.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use reqwest::header::HeaderMap;
use reqwest::{Client, StatusCode};

use crate::provider::Account;
use crate::say;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// An answer, as the client sees it.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    fn replayed(&self) -> bool {
        self.headers.get("idempotent-replayed").is_some_and(|value| value == "true")
    }

    /// In a few words.
    fn shown(&self) -> String {
        let header = |name: &str| self.headers.get(name).and_then(|value| value.to_str().ok());
        let title = serde_json::from_str::<serde_json::Value>(&self.body).ok();
        let text = title.as_ref().and_then(|body| body.get("id").or_else(|| body.get("title"))?.as_str());
        let mut shown = format!("{} {}", self.status.as_u16(), text.unwrap_or("?"));
        if self.replayed() {
            shown.push_str("  (Idempotent-Replayed: true)");
        }
        if let Some(seconds) = header("retry-after") {
            shown.push_str(&format!("  (Retry-After: {seconds})"));
        }
        shown
    }
}

#[derive(Clone)]
struct Shop {
    client: Client,
    base: String,
    /// What the accounts were charged before: a ledger that lasts knows earlier runs.
    before: HashMap<&'static str, Account>,
}

impl Shop {
    async fn charge(&self, account: &str, key: &str, amount: u32, card: &str) -> Result<Answer> {
        let path = if card == "account" { "charges-on-account" } else { "charges" };
        let response = self
            .client
            .post(format!("{}/{path}", self.base))
            .bearer_auth(account)
            .header("idempotency-key", key)
            .json(&serde_json::json!({ "amount": amount, "card": card }))
            .send()
            .await?;
        Ok(Answer { status: response.status(), headers: response.headers().clone(), body: response.text().await? })
    }

    async fn account(&self, account: &str) -> Result<Account> {
        let response = self.client.get(format!("{}/balance", self.base)).bearer_auth(account).send().await?;
        Ok(response.error_for_status()?.json().await?)
    }

    /// Charges, prints, and wants that status.
    async fn step(&self, what: &str, account: &str, key: &str, order: (u32, &str), wanted: u16) -> Result<Answer> {
        let answer = self.charge(account, key, order.0, order.1).await?;
        say(&format!("  {what:<44} {}", answer.shown()));
        expect(answer.status.as_u16() == wanted, &format!("{what}: {wanted} was expected"))?;
        Ok(answer)
    }

    /// Prints what an account was charged, and wants that.
    async fn check(&self, account: &str, charges: u64, balance: u64) -> Result<Account> {
        let mut found = self.account(account).await?;
        if let Some(before) = self.before.get(account) {
            found.charges -= before.charges;
            found.balance -= before.balance;
        }
        let (times, euros) = (found.charges, found.balance as f64 / 100.0);
        say(&format!("  => {account} was charged {times}x, {euros:.2} in all"));
        expect((found.charges, found.balance) == (charges, balance), &format!("{charges} charges were expected"))?;
        Ok(found)
    }
}

fn expect(holds: bool, what: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(format!("the demo went wrong: {what}").into()) }
}

fn title(text: &str) {
    say(&format!("\n{text}"));
}

const CONCURRENT: usize = 50;

pub(crate) async fn run(address: SocketAddr, store: &str, same_transaction: bool) -> Result<()> {
    let client = Client::builder().no_proxy().build()?;
    let mut shop = Shop { client, base: format!("http://{address}"), before: HashMap::new() };
    for account in ["alice", "bob", "carol", "dave", "erin"] {
        shop.before.insert(account, shop.account(account).await?);
    }
    let together = if same_transaction { ", with charges and balances in the same transaction" } else { "" };
    say(&format!("A payments API on {}, its idempotency keys in: {store}{together}", shop.base));

    // Keys of this run's own: a store that lasts knows those of earlier runs.
    let run = format!("{:x}", rand::random::<u32>());
    let order = &format!("order-1-{run}");
    say(&format!("Every account orders under the key {order}"));
    title(&format!("1. {CONCURRENT} requests at once under one key, on a card that takes 0.7 s"));
    let mut requests = tokio::task::JoinSet::new();
    for _ in 0..CONCURRENT {
        let (shop, order) = (shop.clone(), order.clone());
        requests.spawn(async move {
            shop.charge("alice", &order, 1_200, "slow").await.map(|answer| answer.shown()).map_err(|e| e.to_string())
        });
    }
    let mut answers = BTreeMap::<String, usize>::new();
    for answer in requests.join_all().await {
        *answers.entry(answer?).or_default() += 1;
    }
    for (answer, count) in &answers {
        say(&format!("  {count:>3} x {answer}"));
    }
    expect(answers.values().sum::<usize>() == CONCURRENT, "an answer each")?;
    expect(answers.iter().any(|(answer, count)| answer.starts_with("201") && *count == 1), "one 201")?;
    shop.check("alice", 1, 1_200).await?;

    title("2. The client lost the answer and asks again");
    let replay = shop.step("the same request", "alice", order, (1_200, "slow"), 201).await?;
    expect(replay.replayed(), "a replay")?;
    shop.step("the same key for another amount", "alice", order, (9_900, "slow"), 422).await?;
    shop.check("alice", 1, 1_200).await?;

    title("3. The client hangs up while its card is charged");
    let hung_up = Client::builder().no_proxy().timeout(Duration::from_millis(200)).build()?;
    let hasty = Shop { client: hung_up, ..shop.clone() };
    expect(hasty.charge("bob", order, 500, "slow").await.is_err(), "a time-out of the client")?;
    say(&format!("  {:<44} no answer after 0.2 s", "the request"));
    shop.step("the same request, at once", "bob", order, (500, "slow"), 409).await?;
    tokio::time::sleep(Duration::from_millis(900)).await;
    let replay = shop.step("the same request, later", "bob", order, (500, "slow"), 201).await?;
    expect(replay.replayed(), "a replay")?;
    shop.check("bob", 1, 500).await?;
    say("  (and his key is not alice's, though it has the same name: every account has keys of its own)");

    title("4. A declined card is an answer; the provider is not asked again");
    shop.step("a declined card", "carol", order, (700, "declined"), 402).await?;
    let replay = shop.step("the same request", "carol", order, (700, "declined"), 402).await?;
    expect(replay.replayed(), "a replay")?;
    let account = shop.check("carol", 0, 0).await?;
    expect(account.calls == 1, "one call to the provider")?;

    title("5. A time-out of the provider frees the key; the repeat charges");
    let timeout = shop.step("the provider times out", "dave", order, (300, "flaky"), 504).await?;
    expect(!timeout.replayed(), "no replay")?;
    let retry = shop.step("the same request", "dave", order, (300, "flaky"), 201).await?;
    expect(!retry.replayed(), "no replay")?;
    let replay = shop.step("the same request", "dave", order, (300, "flaky"), 201).await?;
    expect(replay.replayed(), "a replay")?;
    shop.check("dave", 1, 300).await?;

    if same_transaction {
        title("6. A charge on account asks nobody: it is one transaction, and its key needs no lease");
        shop.step("a charge on account", "erin", order, (400, "account"), 201).await?;
        let replay = shop.step("the same request", "erin", order, (400, "account"), 201).await?;
        expect(replay.replayed(), "a replay")?;
        shop.step("the same key for another amount", "erin", order, (900, "account"), 422).await?;
        shop.check("erin", 1, 400).await?;
    }

    title("Every order took effect once.");
    Ok(())
}
