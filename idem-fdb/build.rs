//! Finds out whether FoundationDB's client library is there: nothing that is linked with the driver can be built without.
//! The tests and benchmarks are then built without it, and say that they do not run.

use std::env;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rustc-check-cfg=cfg(fdb_client)");
    println!("cargo:rerun-if-changed=build.rs");
    for variable in ["FDB_CLIENT_LIB_PATH", "LIBRARY_PATH", "IDEM_FDB_CLIENT"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    // The driver's build script takes this variable too.
    let named = env::var_os("FDB_CLIENT_LIB_PATH").map(PathBuf::from);
    let searched = env::var_os("LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib",
        "/usr/lib64",
        "/usr/local/lib",
        "/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "C:/Program Files/foundationdb/lib/foundationdb",
    ];
    let here = |directory: &Path| {
        ["libfdb_c.so", "libfdb_c.dylib", "fdb_c.lib"].iter().any(|name| directory.join(name).exists())
    };
    let elsewhere = env::split_paths(&searched).chain(usual.iter().map(PathBuf::from));
    // To check the tests' sources for errors, for which nothing is linked.
    let assumed = env::var_os("IDEM_FDB_CLIENT").is_some_and(|value| value == "assumed");
    if assumed || named.iter().cloned().chain(elsewhere).any(|directory| here(&directory)) {
        println!("cargo:rustc-cfg=fdb_client");
    }
    if let Some(named) = named.filter(|directory| here(directory)) {
        // The driver's build script says the same, but not again where the variable has changed.
        println!("cargo:rustc-link-search=native={}", named.display());
        // So that tests and benchmarks also find it when they run.
        if env::var("CARGO_CFG_TARGET_FAMILY").is_ok_and(|family| family == "unix") {
            for kind in ["tests", "benches"] {
                println!("cargo:rustc-link-arg-{kind}=-Wl,-rpath,{}", named.display());
            }
        }
    }
}
