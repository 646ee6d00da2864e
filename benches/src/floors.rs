//! The floors: what a team would write by hand on the same server, through the same driver. They promise less: no lease, no
//! fencing, no fingerprint, no retry after a crash.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use idem_postgres::sqlx::{self, AssertSqlSafe, Connection, PgConnection};
use idem_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use idem_redis::redis::cluster::ClusterClient;
use idem_redis::redis::io::tcp::TcpSettings;
use idem_redis::redis::{Client, IntoConnectionInfo, Pipeline, cmd};
use tokio::sync::Semaphore;

use crate::Failed;
use crate::backends::Kind;
use crate::servers::Servers;
use crate::subject::Subject;

/// How long records live where that does not matter, in milliseconds.
const LIFE: u64 = 24 * 60 * 60 * 1_000;
const SHARDS: usize = 256;

/// A floor, and what it is.
#[allow(missing_debug_implementations, reason = "a subject has none")]
pub struct Floor {
    /// What it does, for the table.
    pub name: &'static str,
    /// It.
    pub subject: Arc<dyn Subject>,
}

/// The name of the floor beside a backend of that kind.
#[must_use]
pub fn name_beside(kind: Kind) -> &'static str {
    match kind {
        Kind::Memory => "floor-memory",
        Kind::Postgres | Kind::PostgresUnbatched => "floor-postgres",
        Kind::Redis => "floor-redis",
        Kind::RedisCluster => "floor-redis-cluster",
        Kind::Fdb | Kind::FdbUnbatched => "floor-fdb",
    }
}

/// The floor beside a backend of that kind.
///
/// # Errors
/// As [`Backend::open`](crate::backends::Backend::open).
pub async fn beside(kind: Kind, servers: &Servers) -> Result<Floor, Failed> {
    Ok(match kind {
        Kind::Memory => Floor { name: "HashMaps behind 256 locks", subject: Arc::new(Map::default()) },
        Kind::Postgres | Kind::PostgresUnbatched => Floor {
            name: "INSERT … ON CONFLICT and UPDATE; SELECT",
            subject: Arc::new(Table::open(&servers.postgres()?.url).await?),
        },
        Kind::Redis => Floor {
            name: "SET NX PX and SET PX; GET",
            subject: Arc::new(Commands { connection: single(&servers.redis()?.url).await?, pipelines: true }),
        },
        Kind::RedisCluster => {
            let urls = servers.cluster()?.urls();
            let client = ClusterClient::builder(urls).tcp_settings(TcpSettings::default().set_nodelay(true)).build()?;
            let connection = client.get_async_connection().await?;
            Floor { name: "SET NX PX and SET PX; GET", subject: Arc::new(Commands { connection, pipelines: false }) }
        }
        Kind::Fdb | Kind::FdbUnbatched => {
            Floor { name: "transactions of get and set; get", subject: servers.fdb()?.floor() }
        }
    })
}

/// The schema of Postgres' floor, and the name of FoundationDB's.
#[must_use]
pub fn schema() -> String {
    format!("bench_by_hand_{}", std::process::id())
}

/// Takes what the floors have left out of Postgres and FoundationDB. In Redis it expires.
///
/// # Errors
/// The server's trouble.
pub async fn remove(servers: &Servers) -> Result<(), Failed> {
    if let Some(server) = servers.used_postgres() {
        let mut connection = PgConnection::connect(&server.url).await?;
        let sql = format!("DROP SCHEMA IF EXISTS \"{}\" CASCADE", schema());
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
    }
    if let Some(server) = servers.used_fdb() {
        server.remove_floor().await?;
    }
    Ok(())
}

/// A connection that sends at once, as the store's.
///
/// # Errors
/// The server's trouble.
pub async fn single(url: &str) -> Result<MultiplexedConnection, Failed> {
    let info = url.into_connection_info()?;
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    Ok(Client::open(info.set_tcp_settings(tcp))?.get_multiplexed_async_connection().await?)
}

pub(crate) fn wrong(what: &str) -> Failed {
    format!("the floor is wrong: {what}").into()
}

#[derive(Default)]
struct Entry {
    body: Option<Bytes>,
    until: Option<Instant>,
}

/// Maps behind locks.
struct Map {
    shards: Vec<Mutex<HashMap<String, Entry>>>,
    hasher: RandomState,
}

impl Default for Map {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), hasher: RandomState::new() }
    }
}

impl Map {
    fn with<T>(&self, id: &str, act: impl FnOnce(&mut HashMap<String, Entry>) -> T) -> T {
        let at = self.hasher.hash_one(id) as usize % SHARDS;
        act(&mut self.shards[at].lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn take(&self, id: &str, until: Option<Instant>) -> bool {
        self.with(id, |map| match map.entry(id.to_owned()) {
            std::collections::hash_map::Entry::Occupied(_) => false,
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(Entry { body: None, until });
                true
            }
        })
    }

    fn put(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        self.with(id, |map| map.get_mut(id).map(|entry| entry.body = Some(body.clone()))).ok_or_else(|| wrong("lost"))
    }

    fn is(&self, id: &str, body: Option<&Bytes>) -> Result<(), Failed> {
        let same = self.with(id, |map| map.get(id).is_some_and(|entry| entry.body.as_ref() == body));
        if same { Ok(()) } else { Err(wrong("another body")) }
    }
}

#[async_trait]
impl Subject for Map {
    async fn run(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        self.hold(id).await?;
        self.put(id, body)
    }

    async fn hold(&self, id: &str) -> Result<(), Failed> {
        if self.take(id, None) { Ok(()) } else { Err(wrong("not new")) }
    }

    async fn replay(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        self.is(id, Some(body))
    }

    async fn refuse(&self, id: &str) -> Result<(), Failed> {
        self.is(id, None)
    }

    async fn mismatch(&self, _: &str) -> Option<Result<(), Failed>> {
        None
    }

    async fn race(&self, id: &str, body: &Bytes) -> Result<bool, Failed> {
        let won = self.take(id, None);
        if won {
            self.put(id, body)?;
        }
        Ok(won)
    }

    async fn run_many(&self, ids: &[String], body: &Bytes) -> Option<Result<(), Failed>> {
        let run = async {
            for id in ids {
                self.hold(id).await?;
            }
            ids.iter().try_for_each(|id| self.put(id, body))
        };
        Some(run.await)
    }

    async fn make_short(&self, ids: &[String], life: Duration) -> Result<(), Failed> {
        let until = Some(Instant::now() + life);
        if ids.iter().all(|id| self.take(id, until)) { Ok(()) } else { Err(wrong("not new")) }
    }

    async fn purge(&self) -> Option<Result<u64, Failed>> {
        let (now, mut removed) = (Instant::now(), 0);
        for shard in &self.shards {
            let mut map = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let before = map.len();
            map.retain(|_, entry| entry.until.is_none_or(|until| until > now));
            removed += before - map.len();
        }
        Some(Ok(removed as u64))
    }
}

/// A plain table, and a statement for each step. Its connections are lent without the two pings of the driver's pool, which
/// cost as much as the statement.
struct Table {
    idle: Mutex<Vec<PgConnection>>,
    turns: Semaphore,
}

/// As many as an unbatched store uses.
const CONNECTIONS: usize = 16;

const INSERT: &str =
    "INSERT INTO by_hand (id, state, expires_at) VALUES ($1, 1, now() + interval '1 day') ON CONFLICT (id) DO NOTHING";
const UPDATE: &str = "UPDATE by_hand SET state = 2, code = 201, body = $2 WHERE id = $1 AND state = 1";
const SELECT: &str = "SELECT body FROM by_hand WHERE id = $1 AND expires_at > now()";
const INSERT_MANY: &str = "INSERT INTO by_hand (id, state, expires_at) \
     SELECT id, 1, now() + interval '1 day' FROM unnest($1::text[]) id ON CONFLICT (id) DO NOTHING";
const UPDATE_MANY: &str =
    "UPDATE by_hand SET state = 2, code = 201, body = $2 WHERE id = ANY($1::text[]) AND state = 1";

impl Table {
    async fn open(url: &str) -> Result<Self, Failed> {
        let schema = schema();
        let path = format!("CREATE SCHEMA IF NOT EXISTS \"{schema}\"; SET search_path = \"{schema}\"");
        let mut idle = Vec::with_capacity(CONNECTIONS);
        for _ in 0..CONNECTIONS {
            let mut connection = PgConnection::connect(url).await?;
            sqlx::raw_sql(AssertSqlSafe(path.clone())).execute(&mut connection).await?;
            idle.push(connection);
        }
        let table = Self { idle: Mutex::new(idle), turns: Semaphore::new(CONNECTIONS) };
        let create = "CREATE TABLE IF NOT EXISTS by_hand \
             (id text COLLATE \"C\" PRIMARY KEY, state int, code int, body bytea, expires_at timestamptz)";
        table.with(async |connection| sqlx::raw_sql(create).execute(connection).await.map(drop)).await?;
        Ok(table)
    }

    /// Uses a connection as soon as one is idle.
    async fn with<T>(&self, act: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>) -> Result<T, Failed> {
        let _turn = self.turns.acquire().await?;
        let connection = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut connection = connection.ok_or_else(|| wrong("a connection is lost"))?;
        let result = act(&mut connection).await;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        Ok(result?)
    }

    async fn insert(&self, id: &str) -> Result<bool, Failed> {
        Ok(self.with(async |c| sqlx::query(INSERT).bind(id).execute(c).await).await?.rows_affected() == 1)
    }

    async fn update(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        let done = self.with(async |c| sqlx::query(UPDATE).bind(id).bind(&body[..]).execute(c).await).await?;
        if done.rows_affected() == 1 { Ok(()) } else { Err(wrong("lost")) }
    }
}

#[async_trait]
impl Subject for Table {
    async fn run(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        self.hold(id).await?;
        self.update(id, body).await
    }

    async fn hold(&self, id: &str) -> Result<(), Failed> {
        if self.insert(id).await? { Ok(()) } else { Err(wrong("not new")) }
    }

    async fn replay(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        let found: Option<Vec<u8>> =
            self.with(async |c| sqlx::query_scalar(SELECT).bind(id).fetch_one(c).await).await?;
        if found.as_deref() == Some(&body[..]) { Ok(()) } else { Err(wrong("another body")) }
    }

    async fn refuse(&self, id: &str) -> Result<(), Failed> {
        if self.insert(id).await? { Err(wrong("taken twice")) } else { Ok(()) }
    }

    async fn mismatch(&self, _: &str) -> Option<Result<(), Failed>> {
        None
    }

    async fn race(&self, id: &str, body: &Bytes) -> Result<bool, Failed> {
        let won = self.insert(id).await?;
        if won {
            self.update(id, body).await?;
        }
        Ok(won)
    }

    async fn run_many(&self, ids: &[String], body: &Bytes) -> Option<Result<(), Failed>> {
        let run = async {
            for done in [
                self.with(async |c| sqlx::query(INSERT_MANY).bind(ids).execute(c).await).await?,
                self.with(async |c| sqlx::query(UPDATE_MANY).bind(ids).bind(&body[..]).execute(c).await).await?,
            ] {
                if done.rows_affected() != ids.len() as u64 {
                    return Err(wrong("not all are new"));
                }
            }
            Ok(())
        };
        Some(run.await)
    }

    async fn make_short(&self, _: &[String], _: Duration) -> Result<(), Failed> {
        Ok(())
    }

    async fn purge(&self) -> Option<Result<u64, Failed>> {
        None
    }
}

/// The two commands that somebody in a hurry would send.
struct Commands<C> {
    connection: C,
    /// Whether commands of many keys can go together.
    pipelines: bool,
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Commands<C> {
    async fn take(&self, id: &str) -> Result<bool, Failed> {
        let mut set = cmd("SET");
        set.arg(name(id)).arg(HELD).arg("NX").arg("PX").arg(LIFE);
        Ok(set.query_async::<Option<String>>(&mut self.connection.clone()).await?.is_some())
    }

    async fn put(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        let mut set = cmd("SET");
        set.arg(name(id)).arg(&body[..]).arg("PX").arg(LIFE);
        Ok(set.query_async::<()>(&mut self.connection.clone()).await?)
    }
}

const HELD: &str = "held";

fn name(id: &str) -> String {
    format!("bench:by-hand:{}:{id}", std::process::id())
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync + 'static> Subject for Commands<C> {
    async fn run(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        self.hold(id).await?;
        self.put(id, body).await
    }

    async fn hold(&self, id: &str) -> Result<(), Failed> {
        if self.take(id).await? { Ok(()) } else { Err(wrong("not new")) }
    }

    async fn replay(&self, id: &str, body: &Bytes) -> Result<(), Failed> {
        let found: Option<Vec<u8>> = cmd("GET").arg(name(id)).query_async(&mut self.connection.clone()).await?;
        if found.as_deref() == Some(&body[..]) { Ok(()) } else { Err(wrong("another body")) }
    }

    async fn refuse(&self, id: &str) -> Result<(), Failed> {
        if self.take(id).await? { Err(wrong("taken twice")) } else { Ok(()) }
    }

    async fn mismatch(&self, _: &str) -> Option<Result<(), Failed>> {
        None
    }

    async fn race(&self, id: &str, body: &Bytes) -> Result<bool, Failed> {
        let won = self.take(id).await?;
        if won {
            self.put(id, body).await?;
        }
        Ok(won)
    }

    async fn run_many(&self, ids: &[String], body: &Bytes) -> Option<Result<(), Failed>> {
        if !self.pipelines {
            return None;
        }
        let run = async {
            let mut take = Pipeline::with_capacity(ids.len());
            let mut put = Pipeline::with_capacity(ids.len());
            for id in ids {
                take.cmd("SET").arg(name(id)).arg(HELD).arg("NX").arg("PX").arg(LIFE);
                put.cmd("SET").arg(name(id)).arg(&body[..]).arg("PX").arg(LIFE);
            }
            let taken: Vec<Option<String>> = take.query_async(&mut self.connection.clone()).await?;
            if taken.iter().any(Option::is_none) {
                return Err(wrong("not all are new"));
            }
            Ok(put.query_async::<()>(&mut self.connection.clone()).await?)
        };
        Some(run.await)
    }

    async fn make_short(&self, _: &[String], _: Duration) -> Result<(), Failed> {
        Ok(())
    }

    async fn purge(&self) -> Option<Result<u64, Failed>> {
        None
    }
}
