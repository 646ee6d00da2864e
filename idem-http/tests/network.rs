//! Over real HTTP, on the memory store.
#![allow(missing_docs, clippy::panic, clippy::unwrap_used, reason = "tests")]

#[path = "network/all.rs"]
mod all;

use std::sync::Arc;

use idem_core::{KeyStore, MemoryStore};

async fn fresh() -> Arc<dyn KeyStore> {
    Arc::new(MemoryStore::new())
}

macro_rules! tests {
    ($($name:ident,)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                all::$name(fresh().await).await;
            }
        )+
    };
}

all::list!(tests);
