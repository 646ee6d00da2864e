//! What a pair (reserve + complete) costs beside time, on every backend that is present and on the floor beside it: `cargo
//! bench -p idem-benches --bench costs`. Outcomes of 256 bytes.
//!
//! - Round trips and bytes: counted by a proxy of TCP between the driver and a private server, by one caller and by 64. On a
//!   cluster and on FoundationDB they are not counted, since their nodes tell the client their own addresses.
//! - Processor's time: of the server's processes and of this one, as `/proc` tells it, with 64 callers and no proxy. A
//!   cluster's has its replicas' in it.
//! - Memory and disk: what the server says it has used, before and after. Of a cluster, its masters' memory; of
//!   FoundationDB, the keys and values, to which its engines add what they need.
//! - Allocations: of one thread that is client, driver and runtime together, by one caller and by 64; a key, a request and an
//!   outcome for each pair are among them. Those of FoundationDB's client library are not.
//!
//! `IDEM_BENCH_RECORDS` (default 50000): pairs for each figure. `IDEM_BENCH_BACKENDS=redis,memory` chooses.
#![allow(clippy::print_stdout, missing_docs, reason = "a program for the terminal")]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use allocation_counter::AllocationInfo;
use bytes::Bytes;
use idem_benches::backends::{self, Backend, Kind};
use idem_benches::proxy::{Proxy, Traffic};
use idem_benches::servers::{Postgres, Redis, Servers};
use idem_benches::subject::{Store, Subject};
use idem_benches::workloads::{body, next};
use idem_benches::{Failed, floors, id, is_smoke, process};
use idem_postgres::sqlx::{self, Connection, PgConnection};
use idem_redis::redis::cmd;

const BODY: usize = 256;
const CALLERS: u64 = 64;
/// Pairs of which allocations are counted.
fn sampled() -> u64 {
    if is_smoke() { 50 } else { 1_000 }
}

fn main() -> ExitCode {
    match costs() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What is measured: a backend, or the floor beside it.
#[derive(Clone, Copy)]
struct Measured {
    backend: &'static Backend,
    is_floor: bool,
}

/// A subject, and where the server keeps its records.
struct Opened {
    subject: Arc<dyn Subject>,
    /// The schema of Postgres, or the name of FoundationDB's subspace.
    schema: String,
    /// Also beside a floor, for the server's processes.
    backend: backends::Opened,
}

impl Measured {
    async fn open(&self, servers: &Servers) -> Result<Opened, Failed> {
        let backend = self.backend.open(servers).await??;
        let (subject, schema): (Arc<dyn Subject>, _) = if self.is_floor {
            (floors::beside(self.backend.kind, servers).await?.subject, floors::schema())
        } else {
            (Arc::new(Store::new(backend.store.clone())), backend.namespace.clone())
        };
        Ok(Opened { subject, schema, backend })
    }
}

/// Figures of one row; `None` where there is none.
#[derive(Default)]
struct Costs {
    alone: Option<(Traffic, u64)>,
    together: Option<(Traffic, u64)>,
    server_cpu: Option<f64>,
    client_cpu: Option<f64>,
    memory: Option<f64>,
    disk: Option<f64>,
    log: Option<f64>,
    pair: AllocationInfo,
    pair_together: AllocationInfo,
    replay: AllocationInfo,
}

fn costs() -> Result<(), Failed> {
    let records = match std::env::var("IDEM_BENCH_RECORDS") {
        Ok(text) => text.parse()?,
        Err(_) if is_smoke() => 500,
        Err(_) => 50_000,
    };
    let servers = Servers::default();
    let (mut rows, mut absent, mut seen) = (Vec::new(), Vec::new(), Vec::new());
    // The near-cache changes nothing about pairs.
    for backend in Backend::chosen()?.into_iter().filter(|backend| !backend.cached) {
        let opened = tokio::runtime::Runtime::new()?.block_on(async {
            match backend.open(&servers).await? {
                Ok(opened) => opened.close().await.map(Ok),
                Err(absent) => Ok(Err(absent)),
            }
        })?;
        if let Err(reason) = opened {
            absent.push(format!("{}: absent: {reason}", backend.name));
            continue;
        }
        // Some have the same.
        let floor = floors::name_beside(backend.kind);
        let has_floor = !seen.contains(&floor);
        seen.push(floor);
        for is_floor in [true, false] {
            if is_floor && !has_floor {
                continue;
            }
            let measured = Measured { backend, is_floor };
            let name = if is_floor { format!("floor of {}", backend.name) } else { backend.name.to_owned() };
            println!("{name} …");
            rows.push((name, measure(measured, &servers, records)?));
        }
    }
    tokio::runtime::Runtime::new()?.block_on(floors::remove(&servers))?;
    show(&rows);
    absent.iter().for_each(|line| println!("{line}"));
    println!("{records} pairs for each figure of time, memory and disk; outcomes of {BODY} bytes");
    Ok(())
}

fn measure(measured: Measured, servers: &Servers, records: u64) -> Result<Costs, Failed> {
    let kind = measured.backend.kind;
    let mut costs = Costs::default();
    let runtime = tokio::runtime::Runtime::new()?;
    if let Some(port) = port(kind, servers) {
        (costs.alone, costs.together) = runtime.block_on(async {
            let proxy = Proxy::start(port).await?;
            let opened = measured.open(&through(kind, servers, &proxy)?).await?;
            let mut counted = Vec::new();
            for callers in [1, CALLERS] {
                // Connections are made, and statements prepared.
                pairs(&opened.subject, callers, callers * 20).await?;
                let (before, count) = (proxy.traffic(), records.div_ceil(10));
                pairs(&opened.subject, callers, count).await?;
                counted.push((proxy.traffic().since(&before), count));
            }
            opened.backend.close().await?;
            Ok::<_, Failed>((counted.first().copied(), counted.get(1).copied()))
        })?;
    }
    runtime.block_on(async {
        let opened = measured.open(servers).await?;
        pairs(&opened.subject, CALLERS, CALLERS * 20).await?;
        let used = Used::now(kind, servers, &opened.schema).await?;
        let cpu = (process::own_cpu(), process::cpu(&opened.backend.processes));
        pairs(&opened.subject, CALLERS, records).await?;
        let spent = (process::own_cpu(), process::cpu(&opened.backend.processes));
        let used = Used::now(kind, servers, &opened.schema).await?.since(&used);
        let each = |sum: Option<f64>| Some(sum? / records as f64);
        let seconds = |before: Option<std::time::Duration>, after: Option<std::time::Duration>| {
            Some(after?.saturating_sub(before?).as_secs_f64() * 1e6 / records as f64)
        };
        costs.client_cpu = seconds(cpu.0, spent.0);
        costs.server_cpu = seconds(cpu.1, spent.1);
        (costs.memory, costs.disk, costs.log) = (each(used.memory), each(used.disk), each(used.log));
        opened.backend.close().await
    })?;
    drop(runtime);

    // Everything on this thread, where allocations are counted.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let opened = runtime.block_on(measured.open(servers))?;
    let (ids, body): (Vec<String>, _) = ((0..sampled()).map(|_| id(next())).collect(), body(BODY));
    runtime.block_on(async {
        for _ in 0..sampled() / 10 {
            opened.subject.run(&id(next()), &body).await?;
        }
        Ok::<_, Failed>(())
    })?;
    let mut results = Vec::with_capacity(2);
    costs.pair = allocation_counter::measure(|| {
        results.push(runtime.block_on(async {
            for id in &ids {
                opened.subject.run(id, &Bytes::copy_from_slice(&body)).await?;
            }
            Ok::<_, Failed>(())
        }));
    });
    costs.pair_together = allocation_counter::measure(|| {
        results.push(runtime.block_on(pairs(&opened.subject, CALLERS, sampled())));
    });
    costs.replay = allocation_counter::measure(|| {
        results.push(runtime.block_on(async {
            for id in &ids {
                opened.subject.replay(id, &body).await?;
            }
            Ok::<_, Failed>(())
        }));
    });
    results.into_iter().collect::<Result<Vec<()>, _>>()?;
    runtime.block_on(opened.backend.close())?;
    if kind == Kind::Memory {
        costs.memory = Some(costs.pair.bytes_current as f64 / sampled() as f64);
    }
    Ok(costs)
}

/// The port of a private server that a proxy can stand before.
fn port(kind: Kind, servers: &Servers) -> Option<u16> {
    match kind {
        Kind::Memory | Kind::RedisCluster | Kind::Fdb | Kind::FdbUnbatched => None,
        Kind::Postgres | Kind::PostgresUnbatched => servers.postgres().ok()?.port(),
        Kind::Redis => servers.redis().ok()?.port(),
    }
}

/// The same server behind the proxy.
fn through(kind: Kind, servers: &Servers, proxy: &Proxy) -> Result<Servers, Failed> {
    let behind = |url: &str, port: Option<u16>| {
        url.replacen(&port.unwrap_or_default().to_string(), &proxy.port().to_string(), 1)
    };
    Ok(if kind == Kind::Redis {
        let redis = servers.redis()?;
        Servers::with_redis(Redis::given(behind(&redis.url, redis.port())))
    } else {
        let postgres = servers.postgres()?;
        Servers::with_postgres(Postgres::given(behind(&postgres.url, postgres.port())))
    })
}

/// Makes so many pairs by so many callers.
async fn pairs(subject: &Arc<dyn Subject>, callers: u64, count: u64) -> Result<(), Failed> {
    let (taken, body) = (Arc::new(AtomicU64::new(0)), body(BODY));
    let tasks: Vec<_> = (0..callers)
        .map(|_| {
            let (subject, taken, body) = (subject.clone(), taken.clone(), body.clone());
            tokio::spawn(async move {
                while taken.fetch_add(1, Ordering::Relaxed) < count {
                    subject.run(&id(next()), &body).await?;
                }
                Ok::<(), Failed>(())
            })
        })
        .collect();
    for task in tasks {
        task.await??;
    }
    Ok(())
}

/// Bytes that a server has used.
#[derive(Default)]
struct Used {
    memory: Option<f64>,
    disk: Option<f64>,
    log: Option<f64>,
}

impl Used {
    async fn now(kind: Kind, servers: &Servers, schema: &str) -> Result<Self, Failed> {
        match kind {
            Kind::Memory => Ok(Self::default()),
            Kind::Postgres | Kind::PostgresUnbatched => {
                let mut connection = PgConnection::connect(&servers.postgres()?.url).await?;
                let (disk, log) = sqlx::query_as(
                    "SELECT (SELECT sum(pg_total_relation_size(c.oid))::float8 FROM pg_class c \
                         WHERE c.relnamespace = to_regnamespace($1) AND c.relkind = 'r'), \
                     (pg_current_wal_lsn() - '0/0')::float8",
                )
                .bind(schema)
                .fetch_one(&mut connection)
                .await?;
                Ok(Self { memory: None, disk, log })
            }
            Kind::Redis => Ok(Self { memory: Some(used_memory(&servers.redis()?.url).await?), ..Self::default() }),
            Kind::RedisCluster => {
                let mut memory = 0.0;
                for master in servers.cluster()?.masters() {
                    memory += used_memory(&master.url()).await?;
                }
                Ok(Self { memory: Some(memory), ..Self::default() })
            }
            Kind::Fdb | Kind::FdbUnbatched => {
                Ok(Self { memory: Some(servers.fdb()?.used(schema).await?), ..Self::default() })
            }
        }
    }

    fn since(&self, before: &Self) -> Self {
        let since = |after: Option<f64>, before: Option<f64>| Some(after? - before?);
        Self {
            memory: since(self.memory, before.memory),
            disk: since(self.disk, before.disk),
            log: since(self.log, before.log),
        }
    }
}

/// Bytes that a Redis has allocated.
async fn used_memory(url: &str) -> Result<f64, Failed> {
    let mut info = cmd("INFO");
    info.arg("memory");
    let text: String = info.query_async(&mut floors::single(url).await?).await?;
    let line = text.lines().find_map(|line| line.strip_prefix("used_memory:")).ok_or("INFO tells no used_memory")?;
    Ok(line.trim().parse()?)
}

fn show(rows: &[(String, Costs)]) {
    println!(
        "\n| | round trips, 1 caller | sent, bytes | received, bytes | round trips, {CALLERS} callers | sent, bytes | \
         received, bytes | server CPU, s per million | client CPU, s per million | memory per record, bytes | disk per \
         record, bytes | log per pair, bytes | allocations per pair, 1 caller | bytes | {CALLERS} callers | bytes | \
         allocations per replay | bytes |"
    );
    println!("|---|{}", "---:|".repeat(17));
    for (name, costs) in rows {
        let mut cells = Vec::new();
        for counted in [costs.alone, costs.together] {
            let each = |of: fn(&Traffic) -> u64| counted.map(|(traffic, pairs)| of(&traffic) as f64 / pairs as f64);
            cells.push(each(|traffic| traffic.round_trips).map(|trips| format!("{trips:.2}")));
            cells.push(each(|traffic| traffic.sent).map(|bytes| format!("{bytes:.0}")));
            cells.push(each(|traffic| traffic.received).map(|bytes| format!("{bytes:.0}")));
        }
        let digit = |figure: Option<f64>| figure.map(|figure| format!("{figure:.1}"));
        let whole = |figure: Option<f64>| figure.map(|figure| format!("{figure:.0}"));
        cells.extend([digit(costs.server_cpu), digit(costs.client_cpu)]);
        cells.extend([whole(costs.memory), whole(costs.disk), whole(costs.log)]);
        for counted in [&costs.pair, &costs.pair_together, &costs.replay] {
            cells.push(digit(Some(counted.count_total as f64 / sampled() as f64)));
            cells.push(whole(Some(counted.bytes_total as f64 / sampled() as f64)));
        }
        let cells: Vec<String> = cells.into_iter().map(|cell| cell.unwrap_or_else(|| "-".to_owned())).collect();
        println!("| {name} | {} |", cells.join(" | "));
    }
    println!();
}
