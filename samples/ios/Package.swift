// swift-tools-version: 5.9
// Open in Xcode, or: swift build. The library goes into an app that has step.onnx and states.safetensors in its bundle.
import PackageDescription

let package = Package(
    name: "TrainOnDevice",
    platforms: [.iOS(.v15), .macOS(.v12)],
    products: [.library(name: "TrainOnDevice", targets: ["TrainOnDevice"])],
    dependencies: [
        .package(url: "https://github.com/microsoft/onnxruntime-swift-package-manager", from: "1.20.0"),
    ],
    targets: [
        .target(
            name: "TrainOnDevice",
            dependencies: [.product(name: "onnxruntime", package: "onnxruntime-swift-package-manager")]
        ),
    ]
)
