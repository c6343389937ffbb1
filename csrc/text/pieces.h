// Text of a byte-level tokenizer's tokens, and incremental detokenisation of one request.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace oneloop {

// Appends UTF-8 `text` escaped as the content of a JSON string, as orjson writes it.
void append_json(std::string& out, const char* text, size_t size);
void append_json(std::string& out, nanobind::handle text);  // a str

// Cache of token texts, filled on demand and shared by all requests. Needs the GIL, like all of this file.
class BytePieces {
public:
    struct Piece {
        std::string bytes;
        std::string json;  // of one that is whole characters
        nanobind::object text;  // the same as str; none for one that is not
    };

    // bytes_of(id) -> bytes: b"" for tokens without text.
    explicit BytePieces(nanobind::object bytes_of) : bytes_of_(std::move(bytes_of)) {}

    // Valid until the next call.
    const Piece& piece(int64_t id);

private:
    Piece learned(int64_t id) const;

    nanobind::object bytes_of_;
    std::vector<int32_t> places_;  // by id: in pieces_, -1 for one that was never met
    std::deque<Piece> pieces_;
    Piece other_;  // with an id that no tokenizer has
};

// Detokenizer of server.text.detokenize for byte-level tokens. Ids are a list, or any other sequence.
class ByteDetokenizer {
public:
    explicit ByteDetokenizer(std::shared_ptr<BytePieces> pieces) : pieces_(std::move(pieces)) {}

    nanobind::object feed(nanobind::handle ids);
    nanobind::object flush();

    // Result of feed(), escaped for JSON.
    void append(PyObject* ids, std::string& json);

private:
    const BytePieces::Piece* whole(PyObject* ids);
    nanobind::object decoded(PyObject* ids);

    std::shared_ptr<BytePieces> pieces_;
    std::string pending_;  // the beginning of a character
};

}  // namespace oneloop
