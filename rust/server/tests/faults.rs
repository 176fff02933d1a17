//! A server whose device fails under it: a GPU whose kernels run on the CPU.

#![allow(missing_docs)]

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use device::{
    Backend,
    cuda::{CudaBackend, CudaError},
};
use engine::{Engine, EngineConfig, MemoryGpuConfig, ModelDType, ModelSource, PagedAttentionConfig};
use kernel_tests::{EmulatedDriver, Order};
use server::{Host, ModelConfig, ServerConfig};

const SHORT: &str = r#"{"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}"#;
const LONG: &str = r#"{"prompt": [5, 6, 7], "max_tokens": 250, "temperature": 0, "ignore_eos": true, "stream": true}"#;

/// A server that goes on until the process ends: its address, and the device of its first model; the others' are sound.
fn start(num_others: usize) -> (String, Arc<EmulatedDriver>) {
    let driver = Arc::new(EmulatedDriver::new(Order::Ascending));
    let backend: Arc<dyn Backend> = Arc::new(CudaBackend::new(Arc::<EmulatedDriver>::clone(&driver)).unwrap());
    let config = EngineConfig {
        dtype: ModelDType::F32,
        max_num_batched_tokens: 16,
        max_num_seqs: 3,
        paged_attention: PagedAttentionConfig {
            block_size: Some(8),
            mem_gpu: Some(MemoryGpuConfig::ContextSize(300)),
            ..PagedAttentionConfig::default()
        },
        ..EngineConfig::default()
    };
    let folder = goldens::dir().join("text/llama");
    let source = ModelSource::from_path(folder).unwrap();
    let engine = Engine::load_onto(&backend, &source, &config, &|_| {}).unwrap();
    let mut hosts: Vec<Arc<dyn Host>> = vec![Arc::new(engine)];
    let mut models = vec![ModelConfig::default()];
    for number in 0..num_others {
        hosts.push(Arc::new(Engine::load(&source, &config, &|_| {}).unwrap()));
        models.push(ModelConfig { model_id: format!("other{number}"), ..ModelConfig::default() });
    }
    let (send, address) = mpsc::channel();
    let settings = ServerConfig { port: 0, models, ..ServerConfig::default() };
    thread::spawn(move || server::serve(hosts, settings, |address| send.send(address.to_owned()).unwrap()));
    let address = address.recv_timeout(Duration::from_secs(60)).unwrap();
    (address.strip_prefix("http://").unwrap().to_owned(), driver)
}

fn send(address: &str, method: &str, path: &str, body: &str) -> TcpStream {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    write!(
        connection,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    connection
}

/// The status and all that comes.
fn ask(address: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut answer = String::new();
    send(address, method, path, body).read_to_string(&mut answer).unwrap();
    (answer[9..12].parse().unwrap(), answer)
}

fn complete(address: &str) -> (u16, String) {
    ask(address, "POST", "/v1/completions", SHORT)
}

/// What a stream has after its device fails behind its first frame.
fn failed_stream(address: &str, driver: &EmulatedDriver, error: CudaError) -> String {
    let mut stream = send(address, "POST", "/v1/completions", LONG);
    let mut answer = Vec::new();
    while !answer.windows(6).any(|part| part == b"data: ") {
        let mut part = [0; 1024];
        let length = stream.read(&mut part).unwrap();
        assert!(length > 0, "{}", String::from_utf8_lossy(&answer));
        answer.extend_from_slice(&part[..length]);
    }
    driver.fail(error);
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

#[test]
fn a_step_that_fails_ends_its_streams_with_an_error_and_a_lost_device_ends_service() {
    let (address, driver) = start(0);
    let (status, before) = complete(&address);
    assert_eq!(status, 200, "{before}");
    let error = CudaError::OutOfMemory { needed_bytes: 4096, free_bytes: 1024 };
    let stream = failed_stream(&address, &driver, error);
    assert!(stream.starts_with("HTTP/1.1 200") && stream.contains("\"code\":\"internal_error\""), "{stream}");
    assert!(!stream.contains("[DONE]"), "{stream}");
    // Others are served as before.
    let text =
        |answer: &str| answer.split("\"choices\"").nth(1).and_then(|rest| rest.split("\"usage\"").next()).map(str::to_owned);
    let (status, after) = complete(&address);
    assert_eq!((status, text(&after)), (200, text(&before)));
    assert_eq!(ask(&address, "GET", "/health", "").0, 200);

    let code = "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)".to_owned();
    let stream = failed_stream(&address, &driver, CudaError::Lost { what: "copying from the GPU".into(), code });
    assert!(stream.contains("\"error\""), "{stream}");
    for (method, path, body) in [("POST", "/v1/completions", SHORT), ("GET", "/health", "")] {
        let (status, answer) = ask(&address, method, path, body);
        assert!(status == 503 && answer.contains("\"code\":\"device_lost\""), "{path}: {answer}");
        assert!(answer.contains("x-should-retry: false"), "clients ask again what cannot be served: {answer}");
    }
    assert_eq!(ask(&address, "GET", "/ready", "").0, 503);
    assert_eq!(ask(&address, "GET", "/live", "").0, 200);
    assert_eq!(ask(&address, "GET", "/metrics", "").0, 200);
}

#[test]
fn a_model_that_is_lost_leaves_the_others_ready() {
    let (address, driver) = start(1);
    let ready = || {
        let (status, answer) = ask(&address, "GET", "/ready", "");
        (status, answer.split("\r\n\r\n").nth(1).unwrap().to_owned())
    };
    assert_eq!(ready(), (200, r#"{"status":"ready","stuck":[],"full":[]}"#.to_owned()));
    let code = "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)".to_owned();
    failed_stream(&address, &driver, CudaError::Lost { what: "copying from the GPU".into(), code });
    assert_eq!(complete(&address).0, 503);
    assert_eq!(ready(), (200, r#"{"status":"ready","stuck":["default"],"full":[]}"#.to_owned()));
    let other = SHORT.replace('{', r#"{"model": "other0", "#);
    assert_eq!(ask(&address, "POST", "/v1/completions", &other).0, 200);
    // Who watches over the process is told nevertheless.
    assert_eq!(ask(&address, "GET", "/health", "").0, 503);
}
