//! The change of day under load.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, reason = "the helpers of tests are tests, each using some")]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_core::{ErrorClass, Key, KeyStore, Reservation, Reserve};
use idem_postgres::sqlx::{self, AssertSqlSafe, PgPool, Row};
use idem_postgres::{Config, PostgresStore};

pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) async fn sql(pool: &PgPool, config: &Config, text: &str) {
    let text = text.replace("{schema}", &format!("\"{}\"", config.schema.as_str()));
    sqlx::raw_sql(AssertSqlSafe(text)).execute(pool).await.unwrap();
}

pub(crate) async fn number(pool: &PgPool, config: &Config, text: &str) -> i64 {
    let text = text.replace("{schema}", &format!("\"{}\"", config.schema.as_str()));
    sqlx::raw_sql(AssertSqlSafe(text)).fetch_one(pool).await.unwrap().get(0)
}

/// Many callers of two processes reserve the same keys while the day changes again and again. How many keys there were,
/// and how many were given out more than once.
pub(crate) async fn midnights(pool: &PgPool, config: &Config, stores: [Arc<PostgresStore>; 2]) -> (usize, usize) {
    const CHANGES: i32 = 60;
    const CALLERS: usize = 24;
    for day in 1..=CHANGES {
        sql(pool, config, &format!("SELECT {{schema}}.make_partition({{schema}}.today() + {day})")).await;
    }
    let over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let store = stores[caller % 2].clone();
            let over = over.clone();
            tokio::spawn(async move {
                let mut acquired = Vec::new();
                // Four callers ask for each key, each at its own pace.
                for number in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let id = format!("{}-{number}", caller / 4);
                    let request =
                        Reserve::new(Key::new("midnight", &id).unwrap()).with_lease(Duration::from_secs(3_600));
                    match store.reserve(&request).await {
                        Ok(Reservation::Acquired(_)) => acquired.push(id),
                        Ok(_) => {}
                        Err(error) => assert_ne!(error.class(), ErrorClass::Permanent, "{error:?}"),
                    }
                }
                acquired
            })
        })
        .collect();
    for day in 1..=CHANGES {
        tokio::time::sleep(Duration::from_millis(50)).await;
        sql(pool, config, &format!("SELECT {{schema}}.change_day({{schema}}.today() + {day})")).await;
    }
    over.store(true, Ordering::Relaxed);
    let mut holders = HashMap::<String, usize>::new();
    for caller in callers {
        for id in caller.await.unwrap() {
            *holders.entry(id).or_default() += 1;
        }
    }
    let rows = number(pool, config, "SELECT count(*) FROM {schema}.records").await;
    let days = number(pool, config, "SELECT count(DISTINCT day) FROM {schema}.records").await;
    assert!(days > 30, "the keys lie in {days} days only");
    let twice = holders.values().filter(|holders| **holders > 1).count();
    assert!(twice > 0 || rows == holders.len() as i64, "{rows} records of {} keys", holders.len());
    (holders.len(), twice)
}
