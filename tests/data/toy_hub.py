"""A Hugging Face hub with one data set, on this machine: the few answers that the data sets library needs.

Run as a script, it reads from that hub what the command line says and prints what came of it as JSON. A process of its
own, as the library takes the hub's address from the environment once and for all.
"""

import hashlib
import http.server
import io
import json
import os
import sys
import threading
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet

NAME = "toy/corpus"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
CARD = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: data/train-*
- config_name: other
  data_files: other/*.parquet
---
"""


def parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(len(texts)))}), sink)
    return sink.getvalue()


def files_of(revision: str) -> dict[str, bytes]:
    return {
        "README.md": CARD.encode(),
        "data/train-00000-of-00002.parquet": parquet(f"{revision} 0", f"{revision} 1"),
        "data/train-00001-of-00002.parquet": parquet(f"{revision} 2"),
        "other/a.parquet": parquet(f"{revision} other"),
    }


FILES = {commit: files_of(revision) for revision, commit in COMMITS.items()}


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        match [unquote(part) for part in url.path.strip("/").split("/")]:
            case ["datasets", "toy", "corpus", "resolve", revision, *path]:
                self.file(self.commit(revision), "/".join(path))
            case ["api", "datasets", "toy", "corpus", "revision", revision]:
                self.info(self.commit(revision))
            case ["api", "datasets", "toy", "corpus", "tree", revision, *folder]:
                self.tree(self.commit(revision), "/".join(folder))
            case ["api", "datasets", "toy", "corpus", "paths-info", revision]:
                self.paths(self.commit(revision), parse_qs(body.decode())["paths"])
            case _:
                self.reply(404, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = answer

    def commit(self, revision: str) -> str | None:
        return COMMITS.get(revision, revision if revision in FILES else None)

    def file(self, commit, path):
        if commit is None:
            return self.reply(404, X_Error_Code="RevisionNotFound")
        if path not in FILES[commit]:
            return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = FILES[commit][path]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        if "Range" not in self.headers:
            return self.reply(200, content, **headers)
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        part = content[int(first) : int(last or len(content)) + 1]
        range = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return self.reply(206, part, Content_Range=range, **headers)

    def info(self, commit):
        files = [{"rfilename": path} for path in FILES[commit]]
        self.reply_json({"id": NAME, "sha": commit, "private": False, "gated": False, "tags": [], "siblings": files})

    def tree(self, commit, folder):
        inside = [path for path in FILES[commit] if path.rpartition("/")[0] == folder]
        folders = {path.split("/")[0] for path in FILES[commit] if "/" in path} if not folder else set()
        self.paths(commit, [*inside, *sorted(folders)])

    def paths(self, commit, paths):
        files = FILES[commit]
        self.reply_json(
            [
                {"type": "file", "path": path, "size": len(files[path]), "oid": hashlib.sha1(files[path]).hexdigest()}
                if path in files
                else {"type": "directory", "path": path, "size": 0, "oid": "0"}
                for path in paths
            ]
        )

    def reply_json(self, value):
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def reply(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def main(home: str, settings: list[dict]) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": home}
    from torchtitan_lite.data.sources.document import Source, SourceError
    from torchtitan_lite.data.sources.reading import load_documents, open_shards

    def loaded(source):
        return load_documents(source, on_bad_record="error", num_proc=1, cache_dir=None)["text"][:]

    def streamed(source):
        shards = open_shards(source, on_bad_record="error")
        return [shards.identity, [[document.text for document in shards.read(i)] for i in range(shards.num_shards)]]

    results = []
    for given in settings:
        source = Source(**{"name": "toy", "dataset": NAME} | given)
        for run in (loaded, streamed):
            try:
                results.append(run(source))
            except SourceError as error:
                results.append(f"SourceError: {error}")
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
