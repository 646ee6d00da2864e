//! A day's records cleared at once, against one by one: `cargo bench -p idem-fdb --bench days`.
//!
//! `IDEM_BENCH_RECORDS` (default a million) is how many there are. A private cluster of one process with the engine `memory`,
//! or the one of `IDEM_FDB_CLUSTER_FILE`.
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::panic, reason = "a program for the terminal")]

#[cfg(not(fdb_client))]
fn main() {
    println!("not run: FoundationDB's client library was not found when this was built");
    assert!(!std::env::var("IDEM_REQUIRE").is_ok_and(|names| names.split(',').any(|name| name == "fdb")), "required");
}

#[cfg(fdb_client)]
fn main() {
    measured::main();
}

#[cfg(fdb_client)]
mod measured {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use idem_core::clock::{Clock, ManualClock};
    use idem_core::{Key, KeyStore, Outcome, PurgeBudget, Reservation, Reserve};
    use idem_fdb::foundationdb::RangeOption;
    use idem_fdb::foundationdb::tuple::Subspace;
    use idem_fdb::{Config, FdbStore};
    use idem_testkit::servers::FdbCluster;

    /// Records written, or cleared one by one, in a transaction.
    const AT_ONCE: u64 = 1_000;

    /// Copies a record under the names of as many as that, as `keys.rs` lays them out.
    async fn fill(store: &FdbStore, day: u64, records: u64) {
        let subspace = &store.records().config().subspace;
        let request = Reserve::new(Key::new("bench", "first").unwrap());
        let Reservation::Acquired(lease) = store.reserve(&request).await.unwrap() else { panic!("not new") };
        store.complete(&lease, &Outcome::new(201, "x")).await.unwrap();
        let place = &subspace.pack(&(1, "records", day, "bench", "first"));
        let value = store.database().create_trx().unwrap().get(place, true).await.unwrap().unwrap();
        let value: &[u8] = &value;
        for first in (0..records).step_by(AT_ONCE as usize) {
            store
                .database()
                .run(|transaction, _| async move {
                    for number in first..(first + AT_ONCE).min(records) {
                        let id = format!("{:016x}-{number:012}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                        transaction.set(&subspace.pack(&(1, "records", day, "bench", id)), value);
                    }
                    Ok(())
                })
                .await
                .unwrap();
        }
    }

    /// What is left, one by one; how many there were.
    async fn clear_each(store: &FdbStore) -> u64 {
        let (begin, end) = store.records().config().subspace.subspace(&(1, "records")).range();
        let mut cleared = 0;
        loop {
            let range = RangeOption { limit: Some(AT_ONCE as usize), ..RangeOption::from((&*begin, &*end)) };
            let range = &range;
            let some = store
                .database()
                .run(|transaction, _| async move {
                    let values = transaction.get_range(range, 1, false).await?;
                    values.iter().for_each(|value| transaction.clear(value.key()));
                    Ok(values.len() as u64)
                })
                .await
                .unwrap();
            if some == 0 {
                return cleared;
            }
            cleared += some;
        }
    }

    #[tokio::main]
    pub(crate) async fn main() {
        let smoke = std::env::args().any(|argument| argument == "--test");
        let asked = std::env::var("IDEM_BENCH_RECORDS").ok().and_then(|text| text.parse().ok());
        let records = asked.unwrap_or(if smoke { 5_000 } else { 1_000_000 });
        let given = std::env::var("IDEM_FDB_CLUSTER_FILE").ok();
        let cluster = given.is_none().then(|| FdbCluster::start().unwrap());
        let file = given.map_or_else(|| cluster.as_ref().unwrap().cluster_file(), Into::into);
        let clock = Arc::new(ManualClock::default());
        let day = clock.now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() / 86_400 + 1;
        let begun = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
        let config = Config::default().with_subspace(Subspace::from(("idem-bench", begun))).with_clock(clock.clone());
        let store = FdbStore::open(Some(&file), config).await.unwrap();

        let start = Instant::now();
        fill(&store, day, records).await;
        println!("{records} records written in {:.1?}", start.elapsed());
        clock.advance(Duration::from_secs(3 * 86_400));
        let start = Instant::now();
        store.purge_expired(PurgeBudget::records(1)).await.unwrap();
        println!("cleared by the day in {:.1?}", start.elapsed());
        assert_eq!(clear_each(&store).await, 0, "the purge has left some");

        // The day after: the clock has moved on.
        fill(&store, day + 3, records).await;
        let start = Instant::now();
        let cleared = clear_each(&store).await;
        println!("{cleared} cleared one by one, {AT_ONCE} in a transaction, in {:.1?}", start.elapsed());
        assert_eq!(cleared, records + 1);
    }
}
