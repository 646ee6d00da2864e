//! The conformance kit on a cluster of six nodes.
#![allow(clippy::panic, reason = "the helpers of tests are tests")]

mod stores;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{Key, KeyStore};
use idem_redis::redis::cluster_routing::Slot;
use idem_redis::{Config, RedisStore};
use idem_testkit::servers::RedisCluster;
use idem_testkit::{Abilities, Fixture, Harness, HarnessError, Missing, Time};

static CLUSTER: LazyLock<Result<RedisCluster, String>> =
    LazyLock::new(|| RedisCluster::start(&[]).map_err(|error| error.to_string()));

fn cluster() -> &'static RedisCluster {
    match &*CLUSTER {
        Ok(cluster) => cluster,
        Err(reason) => panic!("no cluster: {reason}"),
    }
}

fn main() -> std::process::ExitCode {
    idem_testkit::run(Cluster)
}

struct Cluster;

struct Fresh {
    config: Config,
    store: Arc<RedisStore>,
}

impl Fresh {
    async fn open(config: Config) -> Result<Arc<RedisStore>, HarnessError> {
        // One node is enough: it tells the others.
        let nodes = || cluster().urls().into_iter().take(1);
        // Another case may kill its connections meanwhile.
        let store = stores::persist(|| RedisStore::connect_cluster(nodes(), config.clone())).await;
        Ok(Arc::new(store))
    }
}

#[async_trait]
impl Harness for Cluster {
    fn name(&self) -> String {
        "redis cluster".to_owned()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default().with_time(Time::Shifted).with_reopen().with_disturb().with_garble()
    }

    fn missing(&self) -> Option<Missing> {
        CLUSTER.as_ref().err().map(|reason| stores::missing(reason.clone()))
    }

    async fn build(&self) -> Result<Box<dyn Fixture>, HarnessError> {
        let config = stores::fresh_config();
        let store = Fresh::open(config.clone()).await?;
        Ok(Box::new(Fresh { config, store }))
    }
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
        Ok(Fresh::open(self.config.clone()).await?)
    }

    /// Kills the clients of every node, those of the other cases among them, and lets the nodes forget the scripts.
    async fn disturb(&self) -> Result<(), HarnessError> {
        tokio::task::spawn_blocking(|| {
            for node in cluster().nodes() {
                again(|| node.must(&["CLIENT", "KILL", "TYPE", "normal"]))?;
                again(|| node.must(&["SCRIPT", "FLUSH"]))?;
            }
            Ok(())
        })
        .await?
    }

    async fn garble(&self, key: &Key) -> Result<(), HarnessError> {
        let name = stores::name(&self.config, key);
        let answered = cluster()
            .masters()
            .iter()
            .find_map(|node| again(|| node.must(&["SET", &name, "{\"state\":\"done\"}", "PX", "600000"])).ok());
        answered.map(drop).ok_or_else(|| format!("no master has {:?}", Slot::for_key(&name)).into())
    }
}

/// The cases share the cluster, and one that disturbs it may kill the connection of another's harness.
fn again<T>(ask: impl Fn() -> std::io::Result<T>) -> std::io::Result<T> {
    ask().or_else(|_| ask()).or_else(|_| ask())
}
