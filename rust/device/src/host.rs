//! What the process may use of the machine: memory and cores, container limits included.

use std::path::{Path, PathBuf};

/// Memory of the machine, or of the container that the process lives in when that has less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Bytes that exist or that the container may use.
    pub total_bytes: u64,
    /// Bytes that can be used now without swapping; reclaimable file pages count as available.
    pub available_bytes: u64,
}

/// Reads the memory figures: `/proc/meminfo`, lowered by the limits of the control groups (v1 and v2) above the process.
/// Where the system does not tell, the figures are `u64::MAX`.
pub fn host_memory() -> HostMemory {
    let machine =
        std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_meminfo(&text)).unwrap_or_else(physical_pages);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    lower_by_groups(machine, &groups, Path::new("/sys/fs/cgroup"))
}

/// Gives free memory of the heap back to the system, where the allocator can.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim has no preconditions; it is safe to call from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Physical cores that the process may run on: hyperthreads of one core count once, and a container's CPU quota is honoured.
pub fn num_physical_cores() -> usize {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    allowed_cores(Path::new("/sys/devices/system/cpu")).map_or(threads, |cores| cores.min(threads)).max(1)
}

/// Without `/proc/meminfo`: the physical pages, if the system counts them.
fn physical_pages() -> HostMemory {
    // SAFETY: sysconf has no preconditions; it answers -1 for what it does not know.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let total_bytes = match (u64::try_from(pages), u64::try_from(page_bytes)) {
        (Ok(pages), Ok(page_bytes)) if pages > 0 => pages.saturating_mul(page_bytes),
        _ => u64::MAX,
    };
    HostMemory { total_bytes, available_bytes: total_bytes }
}

fn parse_meminfo(text: &str) -> Option<HostMemory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let total_bytes = field("MemTotal")?;
    let available_bytes = field("MemAvailable").or_else(|| field("MemFree")).unwrap_or(total_bytes);
    Some(HostMemory { total_bytes, available_bytes })
}

/// Lowers `memory` by every control group from the process's own up to the root; `groups` is the text of `/proc/self/cgroup`.
fn lower_by_groups(mut memory: HostMemory, groups: &str, root: &Path) -> HostMemory {
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, names) = if controllers.is_empty() {
            (root.to_path_buf(), ["memory.max", "memory.current"])
        } else if controllers.split(',').any(|c| c == "memory") {
            (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes"])
        } else {
            continue;
        };
        for group in ancestors(&root, path) {
            let Some(limit) = read_number(&group.join(names[0])) else { continue };
            let used = read_number(&group.join(names[1])).unwrap_or(0);
            let reclaimable = std::fs::read_to_string(group.join("memory.stat"))
                .ok()
                .and_then(|stat| stat.lines().find_map(|l| l.strip_prefix("inactive_file ")?.trim().parse::<u64>().ok()))
                .unwrap_or(0);
            memory.total_bytes = memory.total_bytes.min(limit);
            memory.available_bytes = memory.available_bytes.min(limit.saturating_sub(used.saturating_sub(reclaimable)));
        }
    }
    memory
}

/// The directories of a control group and of those above it, the mount point last. Inside a container the path may be one of the
/// host, which does not exist here; the mount point is then the container's own group.
fn ancestors(root: &Path, path: &str) -> Vec<PathBuf> {
    let relative = Path::new(path.trim_start_matches('/'));
    relative.ancestors().map(|p| root.join(p)).collect()
}

/// A file that holds one number; "max" (no limit) and anything else is `None`.
fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(target_os = "linux")]
fn allowed_cores(cpus: &Path) -> Option<usize> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a cpu_set_t of the size given, 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0 {
        return None;
    }
    let mut cores = std::collections::HashSet::new();
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: `cpu` is below CPU_SETSIZE.
        if unsafe { libc::CPU_ISSET(cpu, &set) } {
            cores.insert(std::fs::read_to_string(cpus.join(format!("cpu{cpu}/topology/thread_siblings_list"))).ok()?);
        }
    }
    Some(cores.len())
}

#[cfg(not(target_os = "linux"))]
fn allowed_cores(_: &Path) -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       24000000 kB\nMemFree:        10000000 kB\nMemAvailable:   20000000 kB\n";

    #[test]
    fn meminfo_is_in_kib() {
        let expected = HostMemory { total_bytes: 24_000_000 * 1024, available_bytes: 20_000_000 * 1024 };
        assert_eq!(parse_meminfo(MEMINFO), Some(expected));
        assert_eq!(parse_meminfo("MemFree: 1 kB"), None);
    }

    #[test]
    fn the_lowest_control_group_limit_wins() {
        let root = std::env::temp_dir().join(format!("mistral-paged-cgroup-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("a/b/memory.max", "max\n");
        write("a/memory.max", "5000\n");
        write("a/memory.current", "3000\n");
        write("a/memory.stat", "anon 1\ninactive_file 500\n");
        write("memory/c/memory.limit_in_bytes", "9000\n");
        write("memory/c/memory.usage_in_bytes", "8000\n");
        let memory = HostMemory { total_bytes: 10_000, available_bytes: 10_000 };
        let v2 = lower_by_groups(memory, "0::/a/b\n", &root);
        assert_eq!(v2, HostMemory { total_bytes: 5000, available_bytes: 2500 });
        let v1 = lower_by_groups(memory, "7:cpu:/x\n3:cpuset,memory:/c\n", &root);
        assert_eq!(v1, HostMemory { total_bytes: 9000, available_bytes: 1000 });
        assert_eq!(lower_by_groups(memory, "0::/elsewhere\n", &root), memory);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn this_machine_has_memory_and_a_core() {
        let memory = host_memory();
        assert!(memory.available_bytes <= memory.total_bytes && memory.total_bytes > 1 << 20, "{memory:?}");
        assert!(num_physical_cores() >= 1);
    }
}
