# onnxtrain on the CPU. Build, then train what lies in the current folder:
#
#   docker build -t onnxtrain .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" onnxtrain fit model.onnx --data data.csv --target y --loss mse
FROM python:3.13-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ cmake ninja-build \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY src src
COPY native native
COPY include include
ENV ONNXTRAIN_REQUIRE_KERNELS=1
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[cpu,images,parquet,text]" && rm -r /wheels
# Any user may run it: caches go where everyone can write.
ENV HOME=/tmp
WORKDIR /data
ENTRYPOINT ["onnxtrain"]
CMD ["--help"]
