//! The emulation finds what it is there to find. A fault ends the process, so each runs in one of its own.

use std::process::Command;

use device::kernel_args::{GatherRowsArgs, NormArgs};
use kernel_tests::{Buffer, Kernel, Order};

/// Runs an ignored test of this module, and returns what it wrote before it died.
fn fault(name: &str) -> String {
    let test = std::env::current_exe().expect("this program");
    let output =
        Command::new(test).args(["--ignored", "--exact", &format!("guards::{name}"), "--nocapture"]).output().expect("it runs");
    assert!(!output.status.success(), "{name} should have ended the process");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn gather(x: &Buffer, out: &Buffer, row: u32) {
    let rows = Buffer::input(&[row]);
    let args = GatherRowsArgs { x: x.ptr(), rows: rows.ptr(), out: out.ptr(), num_rows: 1, cols: 64 };
    Kernel::named("gather_rows").launch([1, 1, 1], &args, Order::Ascending);
}

#[test]
#[ignore = "a fault on purpose"]
fn reads_past_the_end() {
    gather(&Buffer::input(&[1.0f32; 128]), &Buffer::output::<f32>(64), 2);
}

#[test]
#[ignore = "a fault on purpose"]
fn writes_to_an_input() {
    gather(&Buffer::input(&[1.0f32; 128]), &Buffer::input(&[1.0f32; 64]), 1);
}

#[test]
#[ignore = "a fault on purpose"]
fn writes_into_the_padding() {
    // 252 bytes are padded to 256; the last 4 are not the kernel's.
    gather(&Buffer::input(&[1.0f32; 64]), &Buffer::output::<f32>(63), 0);
}

#[test]
#[ignore = "a fault on purpose"]
fn reads_a_misaligned_vector() {
    let (x, weight, out) = (Buffer::inout(&[1.0f32; 68]), Buffer::input(&[1.0f32; 64]), Buffer::output::<f32>(64));
    let args = NormArgs { x: x.ptr() + 4, weight: weight.ptr(), out: out.ptr(), num_rows: 1, cols: 64, ..NormArgs::default() };
    Kernel::named("rms_norm").launch([1, 1, 1], &args, Order::Ascending);
}

#[test]
#[ignore = "a fault on purpose"]
fn reads_before_it_waits() {
    let (x, weight, out) = (Buffer::inout(&[1.0f32; 64]), Buffer::inout(&[1.0f32; 64]), Buffer::output::<f32>(64));
    let args = NormArgs { x: x.ptr(), weight: weight.ptr(), out: out.ptr(), num_rows: 1, cols: 64, ..NormArgs::default() };
    // Weights are read early, so no kernel may be writing them.
    Kernel::named("rms_norm").launch_behind(&[&weight], [1, 1, 1], &args, Order::Ascending);
}

#[test]
fn reads_of_what_another_kernel_still_writes_are_named() {
    let message = fault("reads_before_it_waits");
    assert!(message.contains("kernel rms_norm") && message.contains("has not waited for it"), "{message}");
}

#[test]
fn accesses_out_of_bounds_are_named() {
    for name in ["reads_past_the_end", "writes_to_an_input"] {
        let message = fault(name);
        assert!(message.contains("kernel gather_rows, CTA (0, 0, 0), thread 0"), "{name}: {message}");
    }
    assert!(fault("writes_into_the_padding").contains("a kernel wrote around a buffer of 252 bytes"));
}

#[test]
fn misaligned_accesses_are_named() {
    let message = fault("reads_a_misaligned_vector");
    assert!(message.contains("kernel rms_norm") && message.contains("misaligned"), "{message}");
}
