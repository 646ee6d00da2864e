//! What processes use, as `/proc` tells it.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

/// Clock ticks a second, as Linux tells times to programs.
const TICKS: u64 = 100;

/// The processor's time that these processes have used, and what they have started: those that run, and those that have ended
/// and been waited for. `None` where there is no `/proc` or no process.
#[must_use]
pub fn cpu(roots: &[u32]) -> Option<Duration> {
    if roots.is_empty() {
        return None;
    }
    let all = all()?;
    let mut ticks = 0;
    for (pid, process) in &all {
        let mut at = Some(*pid);
        while let Some(pid) = at {
            if roots.contains(&pid) {
                ticks += process.ticks;
                break;
            }
            at = all.get(&pid).map(|process| process.parent);
        }
    }
    Some(Duration::from_millis(ticks * 1_000 / TICKS))
}

/// The processor's time that this process has used.
#[must_use]
pub fn own_cpu() -> Option<Duration> {
    let process = stat("self")?;
    Some(Duration::from_millis(process.own * 1_000 / TICKS))
}

/// Bytes of memory that this process holds.
#[must_use]
pub fn own_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

struct Process {
    parent: u32,
    /// Its own, without what it has waited for.
    own: u64,
    ticks: u64,
}

fn stat(pid: &str) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the program's name, which may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let own = number(11)? + number(12)?;
    Some(Process { parent: fields.get(1)?.parse().ok()?, own, ticks: own + number(13)? + number(14)? })
}

fn all() -> Option<HashMap<u32, Process>> {
    let names = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    Some(names.filter_map(|name| Some((name.parse().ok()?, stat(&name)?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_spent_is_counted() {
        let before = (cpu(&[std::process::id()]).unwrap(), own_cpu().unwrap());
        let begun = std::time::Instant::now();
        while own_cpu().unwrap() < before.1 + Duration::from_millis(50) {
            assert!(begun.elapsed() < Duration::from_secs(60), "no time is counted");
            std::hint::black_box((0..100_000).sum::<u64>());
        }
        assert!(cpu(&[std::process::id()]).unwrap() >= before.0 + Duration::from_millis(40));
        assert!(cpu(&[]).is_none());
    }
}
