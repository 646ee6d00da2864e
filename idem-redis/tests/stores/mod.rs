//! The harness of the conformance kit, and what other tests need of it.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    clippy::unwrap_used,
    clippy::panic,
    reason = "the helpers of tests are tests, each using some"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{ErrorClass, Key, KeyStore, Lease, Reservation, Reserve, StoreError};
use idem_redis::redis::{self, Client, cmd};
use idem_redis::{ClockShift, Config, Policy, Prefix, RedisStore};
use idem_testkit::servers::{RedisCluster, RedisServer};
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Missing, Time};

/// The server of this test binary: the one that `IDEM_REDIS_URL` names, or one of its own.
pub(crate) static SERVER: LazyLock<Server> = LazyLock::new(|| match std::env::var("IDEM_REDIS_URL") {
    Ok(url) => Server::Given(url),
    Err(_) => match RedisServer::start(&[]) {
        Ok(server) => Server::Own(server),
        Err(error) => Server::Missing(error.to_string()),
    },
});

pub(crate) enum Server {
    Given(String),
    Own(RedisServer),
    Missing(String),
}

impl Server {
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Given(url) => url.clone(),
            Self::Own(server) => server.url(),
            Self::Missing(reason) => panic!("no Redis: {reason}"),
        }
    }

    pub(crate) fn missing(&self) -> Option<Missing> {
        match self {
            Self::Missing(reason) => Some(missing(reason.clone())),
            Self::Given(_) | Self::Own(_) => None,
        }
    }
}

/// That the tests have no server.
pub(crate) fn missing(reason: String) -> Missing {
    Missing { server: "redis", reason }
}

/// The `main` of a test binary: its tests by name, each on a runtime of its own.
macro_rules! tests {
    ($($name:ident,)+) => {
        fn main() -> std::process::ExitCode {
            let missing = idem_testkit::servers::RedisServer::find().err().map(|error| $crate::stores::missing(error.to_string()));
            idem_testkit::run_tests(missing.as_ref(), &[$((stringify!($name), || $crate::stores::block_on($name()))),+])
        }
    };
}

pub(crate) use tests;

pub(crate) fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test);
}

/// A configuration with a prefix of its own, for servers that need not be durable.
pub(crate) fn fresh_config() -> Config {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Config::default()
        .with_prefix(Prefix::new(format!("kit-{}-{number}", std::process::id())).unwrap())
        .with_on_data_loss(Policy::Ignore)
}

/// A caller that repeats what was not answered, as the contract says.
#[track_caller]
pub(crate) fn persist<T, F: Future<Output = Result<T, StoreError>>>(call: impl Fn() -> F) -> impl Future<Output = T> {
    let asked = std::panic::Location::caller();
    async move {
        let begun = std::time::Instant::now();
        loop {
            match call().await {
                Ok(answer) => return answer,
                Err(error) => {
                    assert_ne!(error.class(), ErrorClass::Permanent, "{asked}: {error:?}");
                    assert!(begun.elapsed() < Duration::from_secs(60), "{asked}: no answer in a minute: {error:?}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }
}

pub(crate) async fn persist_reserve(store: &RedisStore, request: &Reserve) -> Reservation {
    persist(|| store.reserve(request)).await
}

pub(crate) async fn acquire(store: &dyn KeyStore, request: &Reserve) -> Lease {
    match store.reserve(request).await.unwrap() {
        Reservation::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// The name of a key's record in the server.
pub(crate) fn name(config: &Config, key: &Key) -> String {
    let braces = if key.scope().contains('{') || key.id().contains('{') { "{}" } else { "" };
    format!("{}{braces}:{}:{}:{}", config.prefix.as_str(), key.scope().len(), key.scope(), key.id())
}

/// The rights that a store needs, beside those to its keys.
pub(crate) const RIGHTS: &[&str] = &[
    "-@all",
    "+evalsha",
    "+eval",
    "+get",
    "+set",
    "+time",
    "+pttl",
    "+pexpire",
    "+info",
    "+config|get",
    "+scan",
    "+ping",
    "+wait",
];

/// A single server. Every store is of a user of its own, with the rights that it needs and no more.
pub(crate) struct Single;

pub(crate) struct Fresh {
    admin: Client,
    user: String,
    config: Config,
    store: Arc<RedisStore>,
}

impl Fresh {
    async fn admin(&self) -> Result<redis::aio::MultiplexedConnection, HarnessError> {
        Ok(self.admin.get_multiplexed_async_connection().await?)
    }
}

#[async_trait]
impl Harness for Single {
    fn name(&self) -> String {
        "redis".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_reopen().with_disturb().with_garble()
    }

    fn missing(&self) -> Option<Missing> {
        SERVER.missing()
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let config = fresh_config();
        let admin = Client::open(SERVER.url())?;
        let mut connection = admin.get_multiplexed_async_connection().await?;
        let user = config.prefix.as_str().to_owned();
        let mut create = cmd("ACL");
        // Version 6.2 knows no rights to subcommands of CONFIG alone in this form, and takes it all the same.
        create.arg("SETUSER").arg(&user).arg("on").arg(">secret").arg(format!("~{user}*")).arg(RIGHTS);
        create.query_async::<()>(&mut connection).await?;
        let store = Arc::new(RedisStore::connect(&url_of(&user), config.clone()).await?);
        Ok(Box::new(Fresh { admin, user, config, store }))
    }
}

fn url_of(user: &str) -> String {
    SERVER.url().replacen("redis://", &format!("redis://{user}:secret@"), 1)
}

#[async_trait]
impl Fixture for Fresh {
    fn store(&self) -> Arc<dyn KeyStore> {
        self.store.clone()
    }

    async fn advance(&self, by: Duration) -> Result<(), HarnessError> {
        self.config.clock_shift.advance(by);
        Ok(())
    }

    async fn reopen(&self) -> Result<Arc<dyn KeyStore>, HarnessError> {
        Ok(Arc::new(RedisStore::connect(&url_of(&self.user), self.config.clone()).await?))
    }

    /// Kills every connection of the store, and lets the server forget the scripts.
    async fn disturb(&self) -> Result<(), HarnessError> {
        let mut connection = self.admin().await?;
        cmd("CLIENT").arg("KILL").arg("USER").arg(&self.user).query_async::<i64>(&mut connection).await?;
        cmd("SCRIPT").arg("FLUSH").query_async::<()>(&mut connection).await?;
        Ok(())
    }

    async fn garble(&self, key: &Key) -> Result<(), HarnessError> {
        let mut connection = self.admin().await?;
        let garbage = "{\"state\":\"done\"}";
        let mut set = cmd("SET");
        set.arg(name(&self.config, key)).arg(garbage).arg("PX").arg(600_000);
        Ok(set.query_async::<()>(&mut connection).await?)
    }
}
