// The Python module oneloop_text: converts token ids of many streams to bytes on their connections in one call.
//
// All functions hold the GIL and take less time than an event-loop iteration may.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstdio>

#include "pieces.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace oneloop {
namespace {

// Writer of one request's answer: each call sends its ids as one event, between `before` and `after`, as a chunk of HTTP/1.1.
class TokenWriter {
public:
    TokenWriter(nb::object detokenizer, nb::bytes before, nb::bytes after, nb::object connection)
        : bytes_(nb::isinstance<ByteDetokenizer>(detokenizer) ? nb::cast<ByteDetokenizer*>(detokenizer) : nullptr),
          detokenizer_(std::move(detokenizer)),
          connection_(std::move(connection)),
          before_(before.c_str(), before.size()),
          after_(after.c_str(), after.size()) {}

    // Returns false without writing if the connection is closed or would block.
    bool write(PyObject* ids, std::string& body) {
        if (!is_open) return false;
        const nb::object send = connection_.attr("chunk_writer");
        if (send.is_none()) return is_open = false;
        body.clear();
        append_text(ids, body);
        num_tokens += PyList_GET_SIZE(ids);
        if (body.empty()) return true;
        char head[20];
        const int head_size = std::snprintf(head, sizeof head, "%zx\r\n", before_.size() + body.size() + after_.size());
        const size_t size = head_size + before_.size() + body.size() + after_.size() + 2;
        nb::object chunk = nb::steal(PyBytes_FromStringAndSize(nullptr, size));
        if (!chunk.is_valid()) throw nb::python_error();
        char* out = PyBytes_AS_STRING(chunk.ptr());
        for (const auto& [part, part_size] : {std::pair{static_cast<const char*>(head), static_cast<size_t>(head_size)},
                                              {before_.data(), before_.size()},
                                              {body.data(), body.size()},
                                              {after_.data(), after_.size()},
                                              {"\r\n", size_t{2}}})
            out = std::copy_n(part, part_size, out);
        num_written++;
        send(chunk);
        return true;
    }

    int64_t take_num_tokens() {
        const int64_t taken = num_tokens;
        num_tokens = 0;
        return taken;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        TokenWriter* writer = nb::inst_ptr<TokenWriter>(self);
        Py_VISIT(writer->detokenizer_.ptr());
        Py_VISIT(writer->connection_.ptr());
        return 0;
    }

    static int clear(PyObject* self) {
        TokenWriter* writer = nb::inst_ptr<TokenWriter>(self);
        writer->is_open = false;
        writer->bytes_ = nullptr;
        writer->detokenizer_.reset();
        writer->connection_.reset();
        return 0;
    }

    bool is_open = true;
    int64_t num_tokens = 0;   // since they were taken
    int64_t num_written = 0;  // chunks

private:
    void append_text(PyObject* ids, std::string& json) {
        if (bytes_) return bytes_->append(ids, json);
        append_json(json, detokenizer_.attr("feed")(nb::handle(ids)));
    }

    ByteDetokenizer* bytes_;  // detokenizer_, if it is one of ours
    nb::object detokenizer_, connection_;
    std::string before_, after_;
};

// Items of `work`: a writer, its ids, and the caller's key.
nb::list write_all(nb::list work) {
    nb::list failed;
    std::string body;
    for (size_t place = 0; place < nb::len(work); place++) {
        const nb::object each = work[place];  // kept: what is called may change the list
        try {
            if (!PyTuple_Check(each.ptr()) || PyTuple_GET_SIZE(each.ptr()) < 2) throw nb::type_error("a tuple is wanted");
            PyObject* ids = PyTuple_GET_ITEM(each.ptr(), 1);
            if (!PyList_Check(ids)) throw nb::type_error("ids are a list");
            TokenWriter& writer = nb::cast<TokenWriter&>(nb::handle(PyTuple_GET_ITEM(each.ptr(), 0)));
            if (!writer.write(ids, body)) failed.append(nb::make_tuple(each, nb::none()));
        } catch (nb::python_error& error) {
            if (error.matches(PyExc_Exception))
                failed.append(nb::make_tuple(each, error.value()));
            else
                throw;
        }
    }
    return failed;
}

PyType_Slot kSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&TokenWriter::traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(&TokenWriter::clear)},
                        {0, nullptr}};

}  // namespace
}  // namespace oneloop

NB_MODULE(oneloop_text, m) {
    using namespace oneloop;
    nb::set_leak_warnings(false);  // tables of tokenizers live as long as the process
    m.doc() = "Token ids to text and to a connection. Use it through server.text.";

    nb::class_<BytePieces>(m, "BytePieces", "What each token of a byte-level tokenizer stands for.")
        .def(nb::init<nb::object>(), "bytes_of"_a, "bytes_of(id): its bytes. May not know this object.");
    nb::class_<ByteDetokenizer>(m, "ByteDetokenizer", "One request's way from ids to text.")
        .def(nb::init<std::shared_ptr<BytePieces>>(), "pieces"_a)
        .def("feed", &ByteDetokenizer::feed, "ids"_a)
        .def("flush", &ByteDetokenizer::flush);
    nb::class_<TokenWriter>(m, "TokenWriter", "One answer's ids to chunks of HTTP/1.1, each an event.", nb::type_slots(kSlots))
        .def(nb::init<nb::object, nb::bytes, nb::bytes, nb::object>(), "detokenizer"_a, "before"_a, "after"_a, "connection"_a,
             "connection.chunk_writer: what takes a chunk, None where that would wait.")
        .def_rw("is_open", &TokenWriter::is_open)
        .def_ro("num_written", &TokenWriter::num_written)
        .def("take_num_tokens", &TokenWriter::take_num_tokens)
        .def_static("write_all", &write_all, "work"_a,
                    "Each of `work`: a writer, a list of ids, and more. Those that could not be written, with the error if there "
                    "was one.");
}
