"""Handlers of /v1/files and /v1/batches: files of clients, and batches of requests that run in the background."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from server.api.route import BODY_REFUSALS, FORM, JSON, route
from server.api.service import Service
from server.batches import api_types
from server.batches.api_types import BATCH, CreateBatch, ListFilesQuery, ListQuery, expires_after, is_expiry, page
from server.batches.files import ADMINISTRATOR, INPUT, FileStore, Owner, StoredFile, new_id
from server.batches.folder import BatchFolder
from server.batches.runner import BatchRunner
from server.batches.store import StoredBatch
from server.config.server_config import ServerConfig
from server.http.answers import json_response
from server.http.body import read_query, read_request
from server.http.call import call_of, note_ignored
from server.http.errors import BatchesOff, InvalidRequest, clip
from server.http.upload import FormUpload, read_upload

MAX_FILENAME = 255
BYTES = "application/octet-stream"
FILE_ID = {"file_id": "The id of a file"}


def folder_of(service: Service) -> BatchFolder:
    """Return the folder with files and batches. Raises BatchesOff without --batch-dir."""
    if service.batch_folder is None:
        raise BatchesOff
    return service.batch_folder


def owner_of(http: Request) -> Owner:
    if call_of(http).is_admin:
        return Owner(ADMINISTRATOR, is_admin=True)
    key = call_of(http).key
    return Owner(None if key is None else key.hex())


@route(
    "POST", "/v1/files", "createFile", "Batches", "Upload a file of requests; a form, not JSON",
    {JSON: api_types.FileBody}, api_types.FileUpload, (400, 403, 404, 413, 415), request_media=FORM,
)  # fmt: skip
async def create_file(service: Service, http: Request) -> ASGIApp:
    folder, config = folder_of(service), service.config
    owner = owner_of(http).key
    folder.files.check_room(owner, 0)
    async with _reading(folder.files, owner, http, config) as upload:
        if (purpose := upload.fields.get("purpose")) != INPUT:
            what = "is missing" if purpose is None else f"{clip(purpose)!r} is not supported"
            raise InvalidRequest(f"purpose {what}: only files for batches are stored (purpose=batch)", param="purpose")
        note_ignored(http, [name for name in upload.fields if name != "purpose" and not is_expiry(name)], config)
        expiry, now = expires_after(upload.fields), int(folder.files.clock())
        name = upload.filename.replace("\\", "/").rpartition("/")[2][-MAX_FILENAME:]
        until = None if expiry is None else now + expiry.seconds
        file = StoredFile(new_id("file-"), upload.num_bytes, now, name, INPUT, owner, until)
        await folder.files.add(upload.content, file)
    if until is not None and (runner := service.batches) is not None:
        runner.expiry.look_again()
    return json_response(file.body)


@contextlib.asynccontextmanager
async def _reading(
    files: FileStore, owner: str | None, http: Request, config: ServerConfig
) -> AsyncIterator[FormUpload]:
    """Yield an uploaded file. Its size is reserved during the upload, so that parallel uploads cannot exceed the limits."""
    announced = http.headers.get("content-length", "")
    limit = config.max_batch_file_size
    num_bytes = min(int(announced), limit) if announced.isdigit() else limit
    files.reserve(owner, num_bytes)
    try:
        async with read_upload(http, config, limit) as upload:
            files.account(owner, -num_bytes)  # from here on the file itself counts
            num_bytes = 0
            yield upload
    finally:
        files.account(owner, -num_bytes)


@route(
    "GET", "/v1/files", "listFiles", "Batches", "Files, the newest first", {JSON: api_types.FileList}, None, (400, 404),
    query=ListFilesQuery,
)  # fmt: skip
async def list_files(service: Service, http: Request) -> ASGIApp:
    folder, query = folder_of(service), read_query(http, ListFilesQuery, service.config)
    found = [file for file in folder.files.owned(owner_of(http)) if query.purpose in (None, file.purpose)]
    if query.order == "asc":
        found.reverse()
    return json_response(page(api_types.FileList, found, after=query.after, limit=query.limit))


@route(
    "GET", "/v1/files/{file_id}", "retrieveFile", "Batches", "A file's description", {JSON: api_types.FileBody}, None,
    (404,), parameters=FILE_ID,
)  # fmt: skip
async def retrieve_file(service: Service, http: Request) -> ASGIApp:
    folder = folder_of(service)
    return json_response(folder.files.find(http.path_params["file_id"], owner_of(http)).body)


@route(
    "GET", "/v1/files/{file_id}/content", "downloadFile", "Batches", "A file's content", {BYTES: None}, None, (404,),
    parameters=FILE_ID,
)  # fmt: skip
async def download(service: Service, http: Request) -> ASGIApp:
    folder = folder_of(service)
    file = folder.files.find(http.path_params["file_id"], owner_of(http))
    return FileResponse(folder.files.path(file.id), media_type=BYTES)


@route(
    "DELETE", "/v1/files/{file_id}", "deleteFile", "Batches", "Delete a file that no unfinished batch needs",
    {JSON: api_types.DeletedFile}, None, (400, 404), parameters=FILE_ID,
)  # fmt: skip
async def delete_file(service: Service, http: Request) -> ASGIApp:
    folder, id = folder_of(service), http.path_params["file_id"]
    folder.files.find(id, owner_of(http))
    user = next((batch.id for batch in folder.batches.unfinished() if batch.input_file_id == id), None)
    if user is not None:
        raise InvalidRequest(f"the file is in use by {user}; cancel it first", param="file_id")
    await folder.files.delete(id, owner_of(http))
    return json_response(api_types.DeletedFile(id=id))


# --- batches ----------------------------------------------------------------------------------------------------------


BATCH_ID = {"batch_id": "The id of a batch"}


def runner_of(service: Service) -> BatchRunner:
    """Return the object that runs batches. Raises BatchesOff without --batch-dir."""
    if service.batches is None:
        raise BatchesOff
    return service.batches


@route(
    "POST", "/v1/batches", "createBatch", "Batches", "Answer a file of requests in the background",
    {JSON: api_types.BatchBody}, CreateBatch, (*BODY_REFUSALS, 429),
)  # fmt: skip
async def create_batch(service: Service, http: Request) -> ASGIApp:
    folder, runner, owner = folder_of(service), runner_of(service), owner_of(http)
    given = await read_request(http, BATCH, service.config)
    file = folder.files.find(given.input_file_id, owner)
    if file.purpose != INPUT:
        raise InvalidRequest(f"{file.id} is for {file.purpose}, not for batches", param="input_file_id")
    batch = StoredBatch(
        id=new_id("batch_"), owner=owner.key, input_file_id=file.id, endpoint=given.endpoint,
        window=given.completion_window, window_s=given.window_s,
        output_ttl_s=None if given.output_expires_after is None else given.output_expires_after.seconds,
        metadata=given.metadata,
    )  # fmt: skip
    return json_response((await runner.submit(batch)).body)


@route(
    "GET", "/v1/batches", "listBatches", "Batches", "The newest first", {JSON: api_types.BatchList}, None, (400, 404),
    query=ListQuery,
)  # fmt: skip
async def list_batches(service: Service, http: Request) -> ASGIApp:
    folder, query = folder_of(service), read_query(http, ListQuery, service.config)
    found = folder.batches.owned(owner_of(http))
    return json_response(page(api_types.BatchList, found, after=query.after, limit=query.limit))


@route(
    "GET", "/v1/batches/{batch_id}", "retrieveBatch", "Batches", "Where a batch stands", {JSON: api_types.BatchBody},
    None, (404,), parameters=BATCH_ID,
)  # fmt: skip
async def retrieve_batch(service: Service, http: Request) -> ASGIApp:
    return json_response(folder_of(service).batches.find(http.path_params["batch_id"], owner_of(http)).body)


@route(
    "POST", "/v1/batches/{batch_id}/cancel", "cancelBatch", "Batches", "End a batch; what is answered stays",
    {JSON: api_types.BatchBody}, None, (400, 404), parameters=BATCH_ID,
)  # fmt: skip
async def cancel_batch(service: Service, http: Request) -> ASGIApp:
    batch = folder_of(service).batches.find(http.path_params["batch_id"], owner_of(http))
    return json_response((await runner_of(service).cancel(batch.id)).body)
