use std::{
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::symlink,
    thread,
};

use engine::images::{Limits, decode};

use super::*;

fn png() -> Vec<u8> {
    fs::read(goldens::dir().join("vision/llava/image0.png")).unwrap()
}

fn limits() -> Limits {
    Limits::default()
}

fn said(media: &Media, url: &str) -> String {
    media.image(url, &limits()).unwrap_err().to_string()
}

#[test]
fn a_data_url_is_decoded() {
    let media = Media::of_clients(None, &[]).unwrap();
    let expected = decode(&png(), &limits()).unwrap();
    let text = BASE64.encode(png());
    for url in [format!("data:image/png;base64,{text}"), format!("DATA:image/png;BASE64,{}", text.trim_end_matches('='))] {
        assert_eq!(media.image(&url, &limits()).unwrap(), expected);
    }
    for (url, part) in [
        ("data:image/png,abc", "data:image/png;base64"),
        ("data:image/png;base64,a*b", "no base64"),
        ("data:text/html;base64,aaaa", "not an image"),
        ("data:image/png;base64,aaaa", "no PNG"),
        ("gopher://x/y", "no address of an image"),
        ("image.png", "no address of an image"),
    ] {
        assert!(said(&media, url).contains(part), "{}", said(&media, url));
    }
}

#[test]
fn no_file_outside_of_the_folder_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (root, elsewhere) = (dir.path().join("root"), dir.path().join("elsewhere"));
    fs::create_dir_all(root.join("in")).unwrap();
    fs::create_dir_all(&elsewhere).unwrap();
    fs::write(root.join("in/a b.png"), png()).unwrap();
    fs::write(elsewhere.join("secret.png"), png()).unwrap();
    fs::create_dir_all(dir.path().join("root-too")).unwrap();
    fs::write(dir.path().join("root-too/x.png"), png()).unwrap();
    symlink(elsewhere.join("secret.png"), root.join("link.png")).unwrap();
    symlink(&elsewhere, root.join("folder")).unwrap();
    symlink(root.join("in/a b.png"), root.join("inside.png")).unwrap();
    let url = |path: &str| format!("file://{}/{path}", dir.path().display());
    let closed = Media::of_clients(None, &[]).unwrap();
    assert!(said(&closed, &url("root/in/a%20b.png")).contains("--allowed-local-media-path"));
    let media = Media::of_clients(Some(&root), &[]).unwrap();
    for path in ["root/in/a%20b.png", "root/in/a b.png", "root/inside.png", "root/../root/in/a%20b.png"] {
        media.image(&url(path), &limits()).unwrap();
    }
    for path in [
        "elsewhere/secret.png",
        "root/../elsewhere/secret.png",
        "root/%2e%2e/elsewhere/secret.png",
        "root/link.png",
        "root/folder/secret.png",
        "root-too/x.png",
        "root/missing.png",
        "root/in",
        "root/in/a%20b.png%00",
    ] {
        let said = said(&media, &url(path));
        assert!(said.contains("below the folder") || said.contains("no local path"), "{path}: {said}");
    }
    for url in ["file://host/x.png", "file:x.png", "file:"] {
        assert!(said(&media, url).contains("no local path"), "{}", said(&media, url));
    }
    let small = Limits { max_bytes: 10, ..limits() };
    let error = media.image(&url("root/in/a%20b.png"), &small).unwrap_err().to_string();
    assert!(error.contains("more than the 10 bytes"), "{error}");
    assert!(Media::of_clients(Some(&root.join("nowhere")), &[]).unwrap_err().0.contains("is no folder"));
}

/// A server that gives each connection the same answer; its port.
fn server(answer: Vec<u8>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(&answer);
        }
    });
    port
}

fn ok(body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat()
}

#[test]
fn hosts_that_are_not_listed_or_not_public_are_refused() {
    let port = server(ok(&png()));
    let closed = Media::of_clients(None, &[]).unwrap();
    assert!(said(&closed, "https://example.com/a.png").contains("--allowed-media-domains"));
    let domains = ["localhost", "127.0.0.1", "images.example.com"].map(str::to_owned);
    let media = Media::of_clients(None, &domains).unwrap();
    for (url, part) in [
        (format!("http://localhost:{port}/a.png"), "public internet"),
        (format!("http://127.0.0.1:{port}/a.png"), "public internet"),
        (format!("http://[::ffff:127.0.0.1]:{port}/a.png"), "not fetched"),
        (format!("http://images.example.com@127.0.0.1:{port}/a.png"), "a user or a password"),
        (format!("http://images.example.com.evil.net:{port}/a.png"), "not fetched"),
        ("https://example.com/a.png".to_owned(), "not fetched"),
        ("http:///a.png".to_owned(), "URL"),
    ] {
        assert!(said(&media, &url).contains(part), "{url}: {}", said(&media, &url));
    }
    for domain in ["https://example.com", "example.com/x", "*.example.com", "", "a:80"] {
        assert!(Media::of_clients(None, &[domain.to_owned()]).unwrap_err().0.contains("is no host"), "{domain}");
    }
}

#[test]
fn a_listed_host_gives_one_answer_of_bounded_size() {
    let media = Media::of_clients(None, &["localhost".to_owned()]).unwrap().reaching_private();
    let at = |port: u16| format!("http://LocalHost:{port}/a.png");
    let image = server(ok(&png()));
    assert_eq!(media.image(&at(image), &limits()).unwrap(), decode(&png(), &limits()).unwrap());
    let small = Limits { max_bytes: 10, ..limits() };
    let error = media.image(&at(image), &small).unwrap_err().to_string();
    assert!(error.contains("more than the 10 bytes"), "{error}");
    let redirect = format!("HTTP/1.1 302 Found\r\nlocation: {}\r\ncontent-length: 0\r\n\r\n", at(image));
    assert!(said(&media, &at(server(redirect.into_bytes()))).contains("redirects are not followed"));
    let missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_vec();
    assert!(said(&media, &at(server(missing))).contains("404"));
    assert!(said(&media, &at(server(ok(b"<html>")))).contains("no PNG"));
}
