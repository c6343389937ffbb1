#include "pieces.h"

namespace nb = nanobind;

namespace oneloop {
namespace {

constexpr int64_t kMaxId = int64_t{1} << 22;  // kept in a table; vocabularies have 2^18 tokens

// The id at `place` of a list or a tuple.
int64_t id_at(PyObject* ids, Py_ssize_t place) {
    PyObject* item = PySequence_Fast_GET_ITEM(ids, place);
    const long long id = PyLong_AsLongLong(item);
    if (id == -1 && PyErr_Occurred()) throw nb::python_error();
    return id;
}

nb::object checked(PyObject* made) {
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

}  // namespace

void append_json(std::string& out, nb::handle text) {
    Py_ssize_t size;
    const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (!utf8) throw nb::python_error();
    append_json(out, utf8, static_cast<size_t>(size));
}

void append_json(std::string& out, const char* text, size_t size) {
    static const char kHex[] = "0123456789abcdef";
    size_t plain = 0;  // from here on nothing has been appended
    for (size_t i = 0; i < size; i++) {
        const unsigned char c = text[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        out.append(text + plain, i - plain);
        plain = i + 1;
        out += '\\';
        switch (c) {
            case '\b': out += 'b'; break;
            case '\t': out += 't'; break;
            case '\n': out += 'n'; break;
            case '\f': out += 'f'; break;
            case '\r': out += 'r'; break;
            case '"':
            case '\\': out += c; break;
            default: out.append("u00").append(1, kHex[c >> 4]).append(1, kHex[c & 15]);
        }
    }
    out.append(text + plain, size - plain);
}

BytePieces::Piece BytePieces::learned(int64_t id) const {
    const nb::object data = bytes_of_(id);
    char* bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(data.ptr(), &bytes, &size)) throw nb::python_error();
    Piece piece;
    piece.bytes.assign(bytes, size);
    piece.text = nb::steal(PyUnicode_DecodeUTF8(bytes, size, "strict"));
    if (!piece.text.is_valid()) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw nb::python_error();
        PyErr_Clear();
    } else {
        append_json(piece.json, bytes, size);
    }
    return piece;
}

const BytePieces::Piece& BytePieces::piece(int64_t id) {
    if (id < 0 || id >= kMaxId) return other_ = learned(id);
    if (static_cast<size_t>(id) >= places_.size()) places_.resize(id + 1, -1);
    if (places_[id] < 0) {
        pieces_.push_back(learned(id));  // may run Python, during which other threads may have learned the token
        places_[id] = static_cast<int32_t>(pieces_.size() - 1);
    }
    return pieces_[places_[id]];
}

// The piece that equals the whole text, if there is one.
const BytePieces::Piece* ByteDetokenizer::whole(PyObject* ids) {
    if (PySequence_Fast_GET_SIZE(ids) != 1 || !pending_.empty()) return nullptr;
    const BytePieces::Piece& piece = pieces_->piece(id_at(ids, 0));
    return piece.text.is_valid() ? &piece : nullptr;
}

nb::object ByteDetokenizer::decoded(PyObject* ids) {
    std::string data = pending_;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(ids); i++) data += pieces_->piece(id_at(ids, i)).bytes;
    auto used = static_cast<Py_ssize_t>(data.size());  // Python 3.11.2 does not say it of ASCII
    nb::object text = checked(PyUnicode_DecodeUTF8Stateful(data.data(), data.size(), "replace", &used));
    pending_ = data.substr(used);
    return text;
}

nb::object ByteDetokenizer::feed(nb::handle ids_) {
    const nb::object ids = checked(PySequence_Fast(ids_.ptr(), "ids are a sequence"));
    const BytePieces::Piece* piece = whole(ids.ptr());
    return piece ? piece->text : decoded(ids.ptr());
}

void ByteDetokenizer::append(PyObject* ids, std::string& json) {
    if (const BytePieces::Piece* piece = whole(ids))
        json += piece->json;
    else
        append_json(json, decoded(ids));
}

nb::object ByteDetokenizer::flush() {
    nb::object text = checked(PyUnicode_DecodeUTF8(pending_.data(), pending_.size(), "replace"));
    pending_.clear();
    return text;
}

}  // namespace oneloop
